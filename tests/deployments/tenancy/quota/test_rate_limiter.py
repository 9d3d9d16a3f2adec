"""Limits over several ingresses and one owner: exact while it is there, bounded while it is not."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping, Sequence

import pytest

from app.deployments.tenancy.models import RateLimit, Tenant, TenantLimits
from app.deployments.tenancy.quota import rate_limiter
from app.deployments.tenancy.quota.leases import HOLDER_TIMEOUT_S, LeaseGrant, LeaseRequest, QuotaLessor
from app.deployments.tenancy.quota.limits import GcraCounter, LimitError, LimitKey, SpendLimitError
from app.deployments.tenancy.quota.rate_limiter import REPORT_INTERVAL_S, RateLimiter, Reservation
from app.engine.errors import NotReady

REQUESTS, TOKENS = LimitKey("t", "requests", "base"), LimitKey("t", "tokens", "base")
CONCURRENT, SPEND = LimitKey("t", "concurrent"), LimitKey("t", "spend")


class Owner:
    """A lender that can be away, and takes a turn of the event loop to answer."""

    def __init__(self, tenant: Tenant, *, spent: int = 0) -> None:
        self.now_s = 1_000_000_000.0
        self.tenant = tenant
        self.spent = spent
        self.is_away = False
        self.num_calls = 0
        self.restart()

    def restart(self) -> None:
        self.lender = QuotaLessor(lambda _: self.tenant, lambda *_: self.spent)

    async def lend(self, holder: str, wants: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise NotReady("the owner restarts")
        return self.lender.lease(holder, wants, self.now_s)

    def limiter(self, name: str) -> RateLimiter:
        return RateLimiter(self.lend, name, lambda: self.now_s)


def tenant(*, enforce: bool = True, **limits: int) -> Tenant:
    rate = RateLimit(*(limits.pop(name, None) for name in ("requests", "tokens", "day")))
    rates = {"base": rate} if rate != RateLimit() else {}
    return Tenant("t", "t", 0.0, enforce=enforce, limits=TenantLimits(rates, **limits))


async def attempt(limiter: RateLimiter, owner: Owner, needs: Mapping[LimitKey, int]) -> Reservation | LimitError:
    try:
        return await limiter.reserve(owner.tenant, needs)
    except LimitError as error:
        return error


def admitted(results: Sequence[Reservation | LimitError]) -> list[Reservation]:
    return [result for result in results if isinstance(result, Reservation)]


@pytest.mark.parametrize(
    ("limits", "meter"),
    [({"requests": 10}, REQUESTS), ({"day": 10}, LimitKey("t", "day", "base")), ({"max_concurrent": 10}, CONCURRENT)],
)
async def test_a_thousand_first_requests_over_two_ingresses_admit_exactly_the_limit(
    limits: dict[str, int], meter: LimitKey
) -> None:
    owner = Owner(tenant(**limits))
    ingresses = [owner.limiter("a"), owner.limiter("b")]
    results = await asyncio.gather(*(attempt(ingresses[i % 2], owner, {meter: 1}) for i in range(1000)))
    assert len(admitted(results)) == 10
    assert owner.num_calls < 20, "those who wait are asked for together"


async def test_tokens_and_money_are_reserved_before_and_settled_after() -> None:
    owner = Owner(tenant(tokens=1000, spend_cents=1))
    limiter, needs = owner.limiter("a"), {TOKENS: 400, SPEND: 4_000_000}
    first, second = [await limiter.reserve(owner.tenant, needs) for _ in range(2)]
    with pytest.raises(LimitError):
        await limiter.reserve(owner.tenant, needs)
    limiter.settle(first, {TOKENS: 100, SPEND: 1_000_000})
    limiter.settle(first, {TOKENS: 0, SPEND: 0})  # once
    third = await limiter.reserve(owner.tenant, needs)
    for reservation in (second, third):
        limiter.settle(reservation, {TOKENS: 400, SPEND: 4_000_000})
    owner.now_s += 3600
    with pytest.raises(SpendLimitError):
        await limiter.reserve(owner.tenant, needs)
    await limiter.reserve(owner.tenant, {TOKENS: 1000, SPEND: 1_000_000})


async def test_a_request_that_is_larger_than_the_limit_is_told_so_without_asking() -> None:
    owner = Owner(tenant(tokens=100))
    with pytest.raises(LimitError, match="needs 101") as caught:
        await owner.limiter("a").reserve(owner.tenant, {TOKENS: 101})
    assert caught.value.retry_after_s is None
    assert owner.num_calls == 0


async def test_what_one_ingress_holds_and_does_not_use_serves_another() -> None:
    owner = Owner(tenant(requests=100, max_concurrent=5))
    one, two = owner.limiter("a"), owner.limiter("b")
    held = [await one.reserve(owner.tenant, {REQUESTS: 1, CONCURRENT: 1}) for _ in range(5)]
    assert isinstance(await attempt(two, owner, {CONCURRENT: 1}), LimitError)
    for reservation in held:
        one.settle(reservation, {})
    await one.report()
    assert len(admitted([await attempt(two, owner, {CONCURRENT: 1}) for _ in range(6)])) == 5
    owner.now_s += 2.0
    await one.report()  # units lent ahead go back
    assert len(admitted([await attempt(two, owner, {REQUESTS: 1}) for _ in range(120)])) in (95 + 3, 95 + 4)


async def test_at_a_steady_load_over_two_ingresses_less_than_one_percent_is_refused() -> None:
    owner = Owner(tenant(requests=600, tokens=60_000))
    ingresses = [owner.limiter("a"), owner.limiter("b")]
    num_refused, reservations = 0, []
    for index in range(3000):  # five minutes at the limit: a request of 100 tokens each 0.1 s
        needs = {REQUESTS: 1, TOKENS: 100}
        result = await attempt(ingresses[index % 2], owner, needs)
        if isinstance(result, LimitError):
            num_refused += 1
        else:
            reservations.append(result)
        owner.now_s += 0.1
        if index % 5 == 0:
            for ingress in ingresses:
                await ingress.report()
    assert num_refused < 0.01 * 3000


@pytest.mark.parametrize("num_ingresses", [1, 3, 8])
@pytest.mark.parametrize("part", [0.95, 0.99])
async def test_below_the_limit_nothing_trips_early_over_several_ingresses(num_ingresses: int, part: float) -> None:
    """Ten minutes of requests that come as they like, each to any ingress, ask for more tokens than they take, and run
    for up to five seconds: less than one percent is refused at 0.99 of both limits, and far from them nothing is."""
    rng = random.Random(num_ingresses)
    owner = Owner(tenant(requests=600, tokens=120_000, max_concurrent=200))
    ingresses = [owner.limiter(str(index)) for index in range(num_ingresses)]
    open_: list[tuple[float, RateLimiter, Reservation, int]] = []
    started_s, told_s, num_refused, num_asked = owner.now_s, owner.now_s, 0, 0
    while owner.now_s < started_s + 600:
        owner.now_s += rng.expovariate(10 * part)
        for entry in [each for each in open_ if each[0] <= owner.now_s]:
            open_.remove(entry)
            entry[1].settle(entry[2], {REQUESTS: 1, TOKENS: entry[3]})
        while told_s + REPORT_INTERVAL_S <= owner.now_s:
            told_s += REPORT_INTERVAL_S
            for ingress in ingresses:
                await ingress.report()
        limiter, used = rng.choice(ingresses), rng.randint(100, 280)
        result = await attempt(limiter, owner, {REQUESTS: 1, TOKENS: used + 100, CONCURRENT: 1})
        num_asked += 1
        if isinstance(result, LimitError):
            num_refused += 1
        else:
            open_.append((owner.now_s + rng.uniform(0.1, 5.0), limiter, result, used))
    assert num_asked > 5000
    assert num_refused <= (0.01 * num_asked if part > 0.95 else 0)


async def test_above_the_limit_what_is_admitted_is_the_limit() -> None:
    owner = Owner(tenant(requests=600))
    ingresses = [owner.limiter("a"), owner.limiter("b")]
    num_admitted = 0
    for index in range(6000):  # two minutes at five times the limit
        num_admitted += isinstance(await attempt(ingresses[index % 2], owner, {REQUESTS: 1}), Reservation)
        owner.now_s += 0.02
        if index % 25 == 0:
            for ingress in ingresses:
                await ingress.report()
    allowed = 600 + 600 * 2  # at once, and what two minutes refill
    assert 0.99 * allowed <= num_admitted <= allowed


async def test_without_the_owner_each_ingress_admits_the_limit_once_more_and_says_so() -> None:
    owner = Owner(tenant(requests=10))
    ingresses = [owner.limiter("a"), owner.limiter("b")]
    owner.is_away = True
    results = [await attempt(ingress, owner, {REQUESTS: 1}) for ingress in ingresses for _ in range(30)]
    assert len(admitted(results)) == 20
    owner.is_away = False
    for ingress in ingresses:
        await ingress.report()
    owner.now_s += 30.0  # of the 20 five are paid for
    results = [await attempt(ingress, owner, {REQUESTS: 1}) for ingress in ingresses for _ in range(30)]
    assert admitted(results) == []
    owner.now_s += 60.0
    results = [await attempt(ingress, owner, {REQUESTS: 1}) for ingress in ingresses for _ in range(30)]
    assert len(admitted(results)) in (4, 5)


@pytest.mark.parametrize("error", [ValueError("of another release"), None])
async def test_an_owner_that_answers_otherwise_than_it_should_is_away(error: Exception | None) -> None:
    """Whoever waits is answered, and the units that were given back on the way are not lost."""
    owner = Owner(tenant(requests=10))

    async def lend(*_: object) -> list[LeaseGrant]:
        if error is not None:
            raise error
        return []

    limiter = RateLimiter(lend, "a", lambda: owner.now_s)
    async with asyncio.timeout(60):
        results = [await attempt(limiter, owner, {REQUESTS: 1}) for _ in range(12)]
    assert len(admitted(results)) == 10


async def test_an_owner_that_answers_a_busy_event_loop_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer came in time, and is there when the loop gets to it, after the deadline."""
    monkeypatch.setattr(rate_limiter, "OWNER_TIMEOUT_S", 0.2)
    owner, loop = Owner(tenant(requests=1)), asyncio.get_running_loop()

    async def lend(_: str, wants: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        answer: asyncio.Future[list[LeaseGrant]] = loop.create_future()
        grants = [LeaseGrant(0, 0) for _ in wants]
        answering = threading.Thread(target=loop.call_soon_threadsafe, args=(answer.set_result, grants))

        def work() -> None:
            answering.start()
            answering.join()
            time.sleep(0.5)

        loop.call_soon(work)
        return await answer

    limiter = RateLimiter(lend, "a", lambda: owner.now_s)
    assert isinstance(await attempt(limiter, owner, {REQUESTS: 1}), LimitError), "used up elsewhere"


@pytest.mark.parametrize("meter", [REQUESTS, CONCURRENT])
@pytest.mark.parametrize("gives_up", [False, True])
async def test_an_owner_that_stalls_counts_what_was_asked_of_it_meanwhile_once(
    monkeypatch: pytest.MonkeyPatch, meter: LimitKey, gives_up: bool
) -> None:
    """It carries out later all calls that its callers have not waited for."""
    monkeypatch.setattr(rate_limiter, "OWNER_TIMEOUT_S", 0.01)
    owner, goes_on, calls = Owner(tenant(requests=10, max_concurrent=10)), asyncio.Event(), []

    async def late(holder: str, wants: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        await goes_on.wait()
        return await owner.lend(holder, wants)

    async def lend(holder: str, wants: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        calls.append(asyncio.ensure_future(late(holder, wants)))
        return await asyncio.shield(calls[-1])  # an actor carries out what its caller cancels

    limiter = RateLimiter(lend, "a", lambda: owner.now_s)
    held = [await attempt(limiter, owner, {meter: 1}) for _ in range(5)]
    assert len(admitted(held)) == 5
    for _ in range(6):
        await limiter.report()
        owner.now_s += rate_limiter.LATE_ANSWER_S / 2 if gives_up else 0.0
    assert len(calls) == (3 if gives_up else 1)
    goes_on.set()
    await asyncio.gather(*calls)
    for reservation in admitted(held):
        limiter.settle(reservation, {})
    for _ in range(4):
        owner.now_s += 2.0
        await limiter.report()
    counter = owner.lender._counters[meter]
    if isinstance(counter, GcraCounter):
        assert counter.outstanding(owner.now_s) <= 10
    else:
        assert counter.leased == {"a": 0}
    assert len(admitted([await attempt(limiter, owner, {meter: 1}) for _ in range(20)])) >= (5 if gives_up else 4)
    await limiter.close()


async def test_an_owner_that_restarts_learns_who_holds_what() -> None:
    owner = Owner(tenant(max_concurrent=4, spend_cents=1), spent=0)
    one, two = owner.limiter("a"), owner.limiter("b")
    held = [await one.reserve(owner.tenant, {CONCURRENT: 1, SPEND: 2_000_000}) for _ in range(3)]
    one.settle(held.pop(), {SPEND: 2_000_000})
    owner.spent = 2_000_000  # in the ledger
    owner.restart()
    owner.now_s += 2.0  # units that were lent ahead go back
    await one.report()
    results = [await attempt(two, owner, {CONCURRENT: 1, SPEND: 2_000_000}) for _ in range(5)]
    assert len(admitted(results)) == 2


async def test_an_ingress_that_died_holds_nothing() -> None:
    owner = Owner(tenant(max_concurrent=2))
    dead, living = owner.limiter("a"), owner.limiter("b")
    for _ in range(2):
        await dead.reserve(owner.tenant, {CONCURRENT: 1})
    assert isinstance(await attempt(living, owner, {CONCURRENT: 1}), LimitError)
    owner.now_s += HOLDER_TIMEOUT_S + 1
    assert isinstance(await attempt(living, owner, {CONCURRENT: 1}), Reservation)


async def test_who_leaves_while_it_waits_takes_nothing() -> None:
    owner = Owner(tenant(max_concurrent=1))
    limiter = owner.limiter("a")
    waiting = asyncio.create_task(limiter.reserve(owner.tenant, {CONCURRENT: 1}))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(60):
        while not isinstance(await attempt(limiter, owner, {CONCURRENT: 1}), Reservation):
            await asyncio.sleep(0)


async def test_what_is_not_enforced_is_counted() -> None:
    owner = Owner(tenant(requests=3, enforce=False))
    limiter = owner.limiter("a")
    results = [await attempt(limiter, owner, {REQUESTS: 1}) for _ in range(10)]
    assert len(admitted(results)) == 10
    assert limiter.rejected == {("requests", False): 7}


async def test_what_is_not_enforced_is_counted_once_for_a_request_in_two_parts() -> None:
    owner = Owner(tenant(tokens=10, max_concurrent=1, enforce=False))
    limiter = owner.limiter("a")
    for first, second in ((4, 7), (7, 7), (11, 7)):  # beyond with both parts, and twice with the first one already
        held, tokens = (await limiter.reserve(owner.tenant, {CONCURRENT: 1, TOKENS: first})).split(("tokens",))
        limiter.settle(tokens, {})
        reservation = await limiter.reserve(owner.tenant, {CONCURRENT: 1, TOKENS: second}, held)
        assert reservation.is_over_limit
        assert not reservation.units
    assert limiter.rejected == {("tokens", False): 3}
    owner.now_s += 120.0
    assert (await limiter.reserve(owner.tenant, {CONCURRENT: 1, TOKENS: 10})).units, "nothing was held on"


async def test_the_month_s_money_is_new_with_the_month() -> None:
    owner = Owner(tenant(spend_cents=1), spent=9_000_000)
    limiter = owner.limiter("a")
    assert isinstance(await attempt(limiter, owner, {SPEND: 2_000_000}), SpendLimitError)
    owner.now_s += 31 * 86_400
    owner.spent = 0
    assert isinstance(await attempt(limiter, owner, {SPEND: 2_000_000}), Reservation)


async def test_few_requests_ask_the_owner_while_much_is_left() -> None:
    owner = Owner(tenant(requests=100_000, tokens=10_000_000))
    limiter = owner.limiter("a")
    for _ in range(2000):
        limiter.settle(await limiter.reserve(owner.tenant, {REQUESTS: 1, TOKENS: 500}), {TOKENS: 400})
    assert owner.num_calls < 40
    assert limiter.allowance(TOKENS) is not None


async def test_a_question_is_about_what_is_needed_however_many_tenants_there_are() -> None:
    """A thousand tenants' meters in each question took milliseconds of every request."""
    asked: list[int] = []

    async def lend(_: str, wants: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        asked.append(len(wants))
        return [LeaseGrant(want.need, 0) for want in wants]

    limiter = RateLimiter(lend, "ingress", lambda: 1_000_000_000.0)
    for index in range(200):
        tenant = Tenant(f"t{index}", "t", 0.0, limits=TenantLimits(max_concurrent=9))
        await limiter.reserve(tenant, {LimitKey(tenant.id, "concurrent"): 1})
    assert asked == [1] * 200
    await limiter.report()
    assert asked[-1] == 200, "now and then all that is held is told"
