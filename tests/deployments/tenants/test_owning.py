"""Several processes own the limits of one registry: one count of all of them, bounded while their database is away."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator
from itertools import count

import pytest

from app.deployments.registry.database import Database, sqlite_url
from app.deployments.tenants import limiter, owning
from app.deployments.tenants.entries import RateLimit, Tenant, TenantLimits
from app.deployments.tenants.lending import HOLDER_SILENCE_S, Grant, Owners, Want
from app.deployments.tenants.limits import CountCounter, Meter, SpendReached
from app.deployments.tenants.owning import ALONE_S
from app.engine.errors import NotReady
from tests.deployments.tenants.owners import PATIENCE_S, OnTime, Services, is_admitted, num_admitted, transactions
from tests.deployments.tenants.test_limiter import CONCURRENT, REQUESTS, SPEND, TOKENS
from tests.postgres import PostgresServer, find_postgres

PROGRAMS = find_postgres()
DAY = Meter("t", "day", "base")


@pytest.fixture(scope="module", params=["sqlite", *(["postgresql"] if PROGRAMS else [])])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One database for all tests; each has a base model of its own in it."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path_factory.mktemp("registry") / "registry.sqlite")
        return
    assert PROGRAMS is not None, "asked for only where it was found"
    server = PostgresServer(PROGRAMS)
    yield server.new_database()
    server.stop()


@pytest.fixture
def database(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(limiter, "OWNER_TIMEOUT_S", PATIENCE_S)
    database = OnTime(url, secrets.token_hex(32), lambda: 1_000_000_000.0)
    yield database
    database.close()


def refuse(*_: object) -> None:
    raise NotReady("the registry's database does not answer")


@pytest.mark.parametrize("meter", [REQUESTS, CONCURRENT, DAY])
@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_a_limit_of_one_is_every_ingress_s_and_one_in_all(database: Database, meter: Meter, name: str) -> None:
    services = Services(database, requests=1, max_concurrent=1, day=1)
    await services.start("a", "b", "c")
    held = await is_admitted(services, name, {meter: 1})
    assert held is not None
    assert [await is_admitted(services, other, {meter: 1}) for other in "abc"] == [None] * 3
    services.ingresses[name].settle(held, {})
    await services.tell()
    services.now_s += 86_400.0
    others = [await is_admitted(services, other, {meter: 1}) for other in "abc"]
    assert sum(each is not None for each in others) == 1


@pytest.mark.parametrize("needs", [{TOKENS: 1000}, {SPEND: 10_000_000}])
async def test_a_request_that_needs_the_whole_limit_is_admitted_anywhere(
    database: Database, needs: dict[Meter, int]
) -> None:
    services = Services(database, tokens=1000, spend_cents=1)
    ingresses = await services.start("a", "b", "c")
    for name, ingress in zip("abc", ingresses, strict=True):
        held = await is_admitted(services, name, needs)
        assert held is not None
        assert [await is_admitted(services, other, needs) for other in "abc"] == [None] * 3
        ingress.settle(held, dict.fromkeys(needs, 0))
        services.now_s += 2.0
        await services.tell()


@pytest.mark.parametrize(
    ("limits", "meter", "amount"),
    [
        ({"requests": 10}, REQUESTS, 1),
        ({"day": 10}, DAY, 1),
        ({"tokens": 10}, TOKENS, 1),
        ({"max_concurrent": 10}, CONCURRENT, 1),
        ({"spend_cents": 1}, SPEND, 1_000_000),
    ],
)
async def test_a_thousand_requests_over_three_owners_admit_exactly_the_limit(
    database: Database, limits: dict[str, int], meter: Meter, amount: int
) -> None:
    services = Services(database, **limits)
    await services.start("a", "b", "c")
    asks = [is_admitted(services, "abc"[index % 3], {meter: amount}) for index in range(1000)]
    results = await asyncio.gather(*asks)
    assert sum(result is not None for result in results) == 10
    assert services.num_calls < 30, "those who wait are asked for together"


async def test_one_owner_asks_no_database(database: Database) -> None:
    services = Services(database, requests=10, max_concurrent=10)
    await services.start("a")
    with transactions() as opened:
        assert await num_admitted(services, "a", {REQUESTS: 1, CONCURRENT: 1}, 20) == 10
        await services.tell()
    assert opened == []


async def test_what_one_owner_admitted_before_others_came_is_known_to_them(database: Database) -> None:
    services = Services(database, requests=10, max_concurrent=10, spend_cents=1)
    await services.start("a")
    needs = {REQUESTS: 1, CONCURRENT: 1, SPEND: 1_000_000}
    assert await num_admitted(services, "a", needs, 7) == 7
    services.now_s += 2.0  # units that were lent ahead go back
    await services.tell()
    await services.start("b")
    for meter, amount in needs.items():
        assert await num_admitted(services, "b", {meter: amount}, 5) == 3, meter


async def test_the_last_owner_counts_on_by_itself(database: Database) -> None:
    services = Services(database, day=10, max_concurrent=10, spend_cents=1)
    await services.start("a", "b")
    needs = {DAY: 1, CONCURRENT: 1, SPEND: 1_000_000}
    for name in "ab":
        held = [await is_admitted(services, name, needs) for _ in range(3)]
        for reservation in held:
            assert reservation is not None
            services.ingresses[name].settle(reservation, needs)
    await services.tell()
    services.stop("b")
    await services.look()
    services.now_s += ALONE_S
    await services.tell()
    await services.look()
    with transactions() as opened:
        assert await num_admitted(services, "a", {SPEND: 1_000_000}, 9) == 4
        assert await num_admitted(services, "a", {DAY: 1}, 9) == 4
    assert len(opened) == 1, "the ledger is asked what was spent, once a month and project"
    await services.start("c")
    assert await num_admitted(services, "c", {SPEND: 1_000_000}, 9) == 0


async def test_an_owner_that_died_holds_nothing(database: Database) -> None:
    services = Services(database, max_concurrent=2, spend_cents=1)
    await services.start("a", "b", "c")
    assert await num_admitted(services, "a", {CONCURRENT: 1, SPEND: 5_000_000}, 2) == 2
    assert await num_admitted(services, "b", {CONCURRENT: 1}, 1) == 0
    services.stop("a")  # as the registry's rows of processes say
    await services.look()
    assert await num_admitted(services, "b", {CONCURRENT: 1, SPEND: 5_000_000}, 3) == 2


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_what_an_ingress_that_died_had_spent_without_a_word_is_learnt_from_the_ledger(
    database: Database, names: str
) -> None:
    services = Services(database, spend_cents=1)
    await services.start(*names)
    owner = services.owners["a"]
    (grant,) = await owner.lend("dead", [Want(SPEND, 6_000_000, 6_000_000)], services.now_s)
    services.now_s += HOLDER_SILENCE_S + 1
    await owner.lend("alive", [Want(SPEND, used=1)], services.now_s)
    assert await owner.remaining_spend("t", services.now_s) == 10_000_000 - grant.granted
    services.spend(2_000_000, 1)
    for name in names:
        await services.look()
        assert await services.owners[name].remaining_spend("t", services.now_s) == 8_000_000
    services.spend(3_000_000, 2)  # a replica went on for it, and for another, which says so
    services.now_s += 2.0
    await services.look()
    await owner.lend("alive", [Want(SPEND, used=1_000_001)], services.now_s)
    assert await owner.remaining_spend("t", services.now_s) == 4_000_000
    services.now_s += 2.0
    await services.look()
    for name in names:
        assert await services.owners[name].remaining_spend("t", services.now_s) == 5_000_000
    await owner.lend("dead", [Want(SPEND, holding=500_000, used=4_000_000)], services.now_s)  # it was silent, not dead
    assert await owner.remaining_spend("t", services.now_s) == 4_500_000


async def test_what_the_ingresses_of_an_owner_that_died_had_spent_is_learnt_from_the_ledger(database: Database) -> None:
    services = Services(database, spend_cents=1)
    await services.start("a", "b", "c")
    assert await num_admitted(services, "a", {SPEND: 2_000_000}, 2) == 2
    services.spend(3_000_000, 1)
    services.stop("a")
    await services.look()
    assert await num_admitted(services, "b", {SPEND: 1_000_000}, 9) == 7
    services.stop("c")
    services.now_s += ALONE_S
    await services.tell()
    await services.look()  # it counts by itself from here on
    services.spend(500_000, 2)
    services.now_s += 2.0
    await services.look()
    assert await services.owners["b"].remaining_spend("t", services.now_s) == 0


async def test_the_ledger_is_asked_less_and_less_often(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(database, spend_cents=1)
    await services.start("a")
    owner, ledger, asked_s = services.owners["a"], services.books.ledger, list[float]()
    spent_by = ledger.spent_by

    def noting(project_ids: Collection[str], now_s: float) -> dict[str, int]:
        asked_s.append(now_s)
        return spent_by(project_ids, now_s)

    monkeypatch.setattr(ledger, "spent_by", noting)
    for ingress in ("one", "two"):
        await owner.lend(ingress, [Want(SPEND, 1, 1)], services.now_s)
        for _ in range(1800):
            services.now_s += 2.0
            await owner.lend("alive", [], services.now_s)
            await owner.follow(services.now_s)
    first = [each for each in asked_s if each < asked_s[0] + 3590.0]
    assert 20 < len(first) < 60
    assert first[8] - first[0] < 20.0
    assert asked_s[-1] - asked_s[-2] < 500.0
    assert abs(len(asked_s) - 2 * len(first)) < 5, "each death is followed up"


async def test_an_ingress_that_died_holds_nothing_whosever_it_was(database: Database) -> None:
    services = Services(database, max_concurrent=2)
    await services.start("a", "b")
    assert await num_admitted(services, "a", {CONCURRENT: 1}, 2) == 2
    await services.look()
    assert await num_admitted(services, "b", {CONCURRENT: 1}, 1) == 0
    services.now_s += HOLDER_SILENCE_S + 1
    await services.ingresses["b"].tell()
    await services.look()
    assert await num_admitted(services, "b", {CONCURRENT: 1}, 3) == 2


async def test_an_owner_that_restarts_forgets_nothing(database: Database) -> None:
    services = Services(database, day=10, max_concurrent=4, spend_cents=1)
    await services.start("a", "b")
    needs = {DAY: 1, CONCURRENT: 1, SPEND: 2_500_000}
    held = [await is_admitted(services, "a", needs) for _ in range(3)]
    for reservation in held[1:]:
        assert reservation is not None
        services.ingresses["a"].settle(reservation, {SPEND: 2_500_000})
    await services.restart("a", "a again")
    services.now_s += 2.0  # units that were lent ahead go back
    await services.tell()
    assert await num_admitted(services, "b", {CONCURRENT: 1}, 9) == 3
    assert await num_admitted(services, "b", {DAY: 1}, 9) == 7
    assert await num_admitted(services, "b", {SPEND: 2_500_000}, 9) == 1


async def test_the_ledger_says_what_was_spent_before_and_a_new_month_has_new_money(database: Database) -> None:
    services = Services(database, spend_cents=1)
    services.spend(8_000_000, 1)
    await services.start("a", "b")
    assert await num_admitted(services, "b", {SPEND: 1_000_000}, 9) == 2
    with pytest.raises(SpendReached):
        await services.ingresses["a"].reserve(services.tenant, {SPEND: 1_000_000})
    assert await services.owners["a"].remaining_spend("t", services.now_s) == 0
    services.now_s += 31 * 86_400
    assert await num_admitted(services, "a", {SPEND: 1_000_000}, 11) == 10


async def test_while_the_database_is_away_each_ingress_admits_the_limit_once_more(database: Database) -> None:
    services = Services(database, requests=10, spend_cents=1)
    await services.start("a", "b")
    services.is_away = True
    assert [await num_admitted(services, name, {REQUESTS: 1}, 30) for name in "ab"] == [10, 10]
    assert [await num_admitted(services, name, {SPEND: 500_000}, 30) for name in "ab"] == [2, 2]
    services.is_away = False
    await services.tell()
    services.now_s += 30.0  # of the 20 five are paid for
    assert [await num_admitted(services, name, {REQUESTS: 1}, 30) for name in "ab"] == [0, 0]
    services.now_s += 60.0
    assert sum([await num_admitted(services, name, {REQUESTS: 1}, 30) for name in "ab"]) in (4, 5)


async def test_an_answer_that_comes_too_late_has_taken_nothing(database: Database) -> None:
    services = Services(database, requests=10)
    await services.start("a", "b")
    shared = services.books.shared_limits
    times_s = iter([0.0, 1000.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "monotonic", lambda: next(times_s))
        with pytest.raises(NotReady):
            await services.owners["a"].lend("i", [Want(REQUESTS, 10)], services.now_s)
    assert await num_admitted(services, "b", {REQUESTS: 1}, 20) == 10


async def test_a_database_that_hangs_keeps_nobody_waiting(database: Database) -> None:
    """Whoever asks is told in time, also those behind it, and what it did in the end is undone."""
    services = Services(database, requests=10)
    await services.start("a", "b")
    owner = services.owners["a"]
    owner.patience_s = 0.01
    with database.write():
        for _ in range(3):
            with pytest.raises(NotReady):
                await owner.lend("i", [Want(REQUESTS, 10)], services.now_s)
    await owner.close()
    assert await num_admitted(services, "b", {REQUESTS: 1}, 20) == 10


async def test_what_could_not_be_brought_is_brought_later(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(database, requests=10)
    await services.start("a")
    assert await num_admitted(services, "a", {REQUESTS: 1}, 7) == 7

    with monkeypatch.context() as patch:
        patch.setattr(services.books.shared_limits, "bring", refuse)
        with pytest.raises(NotReady):
            await services.start("b")
    for _ in range(2):
        await services.look()
    assert await num_admitted(services, "b", {REQUESTS: 1}, 9) == 3


async def test_where_is_counted_changes_however_long_it_takes(database: Database) -> None:
    """The more has been counted the longer it takes. One that were too late would be as late each time."""
    services = Services(database, day=10)
    await services.start("a")
    assert await num_admitted(services, "a", {DAY: 1}, 7) == 7
    late = pytest.MonkeyPatch()
    late.setattr(services.books.shared_limits, "monotonic", count(0.0, 1000.0).__next__)
    await services.start("b")
    late.undo()
    assert await num_admitted(services, "b", {DAY: 1}, 2) == 2
    services.stop("a")
    await services.look()
    services.now_s += ALONE_S
    late.setattr(services.books.shared_limits, "monotonic", count(0.0, 1000.0).__next__)
    await services.look()
    late.undo()
    with transactions() as opened:
        assert await num_admitted(services, "b", {DAY: 1}, 9) == 1
    assert opened == []


async def test_what_is_left_is_what_all_owners_say(database: Database) -> None:
    services = Services(database, requests=10, max_concurrent=5)
    await services.start("a", "b")
    assert await num_admitted(services, "a", {REQUESTS: 1, CONCURRENT: 1}, 3) == 3
    left = {meter: remaining for meter, _, remaining in await services.owners["b"].left("t", services.now_s)}
    assert left == {REQUESTS: 7, CONCURRENT: 2}


async def test_a_limit_that_is_changed_holds_for_all(database: Database) -> None:
    services = Services(database, requests=10)
    await services.start("a", "b")
    assert await num_admitted(services, "a", {REQUESTS: 1}, 10) == 10
    services.tenant = Tenant("t", "t", 0.0, limits=TenantLimits({"base": RateLimit(12)}))
    assert await num_admitted(services, "b", {REQUESTS: 1}, 10) == 2
    services.tenant = Tenant("t", "t", 0.0)
    grants = await services.owners["b"].lend("i", [Want(REQUESTS, 5)], services.now_s)
    assert grants == [Grant(5, 0)]


async def an_ingress_that_died(services: Services, *meters: Meter) -> None:
    """Of owner `a`: it held one unit of each meter; another of `a`'s is heard."""
    await services.owners["a"].lend("dead", [Want(meter, 1, 1) for meter in meters], services.now_s)
    services.now_s += HOLDER_SILENCE_S + 1
    await services.owners["a"].lend("alive", [], services.now_s)


async def test_lends_go_on_while_an_ingress_that_died_cannot_be_removed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own owner knows that what it held is free; others count it until it is removed."""
    services = Services(database, max_concurrent=2)
    await services.start("a", "b")
    await an_ingress_that_died(services, CONCURRENT)
    with monkeypatch.context() as patch:
        patch.setattr(services.books.shared_limits, "forget", refuse)
        with pytest.raises(NotReady):
            await services.look()
        assert await services.owners["b"].lend("i", [Want(CONCURRENT)], services.now_s) == [Grant(0, 1)]
        assert [each[2] for each in await services.owners["a"].left("t", services.now_s)] == [2]
        assert await services.owners["a"].lend("alive", [Want(CONCURRENT, 2, 2)], services.now_s) == [Grant(2, 0)]


async def test_an_ingress_that_is_heard_again_keeps_what_it_held(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = Services(database, max_concurrent=2)
    await services.start("a", "b")
    await an_ingress_that_died(services, CONCURRENT)
    with monkeypatch.context() as patch:
        patch.setattr(services.books.shared_limits, "forget", refuse)
        with pytest.raises(NotReady):
            await services.look()
    await services.owners["a"].lend("dead", [], services.now_s)
    await services.look()
    assert await services.owners["b"].lend("i", [Want(CONCURRENT, 2, 2)], services.now_s) == [Grant(0, 1)]


@pytest.mark.parametrize("dead", ["dead", 'de"ad', "d%d", "d_d", "d\\d", "d/d", "dé"])
async def test_an_ingress_that_died_is_removed_from_its_rows_in_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    """Rows that do not name it are not read, and whoever waits has its turn between two batches."""
    monkeypatch.setattr(owning, "SWEPT_ROWS", 2)
    services = Services(database, max_concurrent=1, spend_cents=1)
    await services.start("a", "b")
    shared, a, b = services.books.shared_limits, services.owners["a"], services.owners["b"]
    its, others = ([Meter(f"{name}{number}", "concurrent") for number in range(5)] for name in "tu")
    await a.lend(dead, [Want(meter, 1, 1) for meter in its] + [Want(SPEND, used=7)], services.now_s)
    await a.lend(dead, [Want(SPEND, used=8)], services.now_s)
    await b.lend("i", [Want(meter, 1, 1) for meter in others], services.now_s)
    services.now_s += HOLDER_SILENCE_S + 1
    await b.lend("i", [], services.now_s)
    batches: list[Collection[Meter]] = []
    forget = shared.forget

    def noting(owners: Owners, meters: Collection[Meter], now_s: float) -> None:
        batches.append(meters)
        forget(owners, meters, now_s)

    monkeypatch.setattr(shared, "forget", noting)
    await services.look()
    assert batches == [its[:2], its[2:4], its[4:]]
    assert await b.lend("i", [Want(meter, 1, 1) for meter in its], services.now_s) == [Grant(1, 0)] * 5
    await a.lend(dead, [Want(SPEND, used=9)], services.now_s)
    assert await b.remaining_spend("t", services.now_s) == 10_000_000 - 2, "what it reports later counts as before"
    await services.look()
    assert len(batches) == 3, "it is not looked for again"


async def test_ingresses_and_months_that_are_over_are_not_kept(database: Database) -> None:
    """Of money each ingress is kept until the month is over: what it reports late counts."""
    services = Services(database, max_concurrent=1, spend_cents=1)
    await services.start("a")
    owner = services.owners["a"]
    for _ in range(12):
        for number in range(3):
            ingress = f"ingress {services.now_s} {number}"
            await owner.lend(ingress, [Want(CONCURRENT, 1, 1), Want(SPEND, used=1)], services.now_s)
            services.now_s += HOLDER_SILENCE_S + 1
        await owner.lend(ingress, [Want(SPEND, used=4)], services.now_s)
        assert await owner.remaining_spend("t", services.now_s) == 10_000_000 - 3
        services.now_s += 31 * 86_400
    assert len(owner._spent) <= 2
    counters = owner._lender.hand_over(services.now_s - 31 * 86_400)
    kept = {meter: len(counter.used_by) for meter, counter in counters.items() if isinstance(counter, CountCounter)}
    assert kept == {CONCURRENT: 0, SPEND: 3}


@pytest.mark.parametrize("ahead_s", [-1e6, -90.0, 90.0, 1e6])
async def test_a_rate_does_not_depend_on_the_clocks_of_its_owners(database: Database, ahead_s: float) -> None:
    """Each takes what is left in turns: neither gets more for being ahead, nor waits for being behind."""
    services = Services(database, requests=12)
    services.ahead_s["b"] = ahead_s
    await services.start("a")
    assert await num_admitted(services, "a", {REQUESTS: 1}, 4) == 4
    services.now_s += 2.0
    await services.tell()
    await services.start("b")
    assert await num_admitted(services, "b", {REQUESTS: 1}, 20) == 8, "of the first 4 less than one is paid for"
    assert await num_admitted(services, "a", {REQUESTS: 1}, 2) == 0
    services.now_s += 3.5
    for turns in ("ab", "ba") * 12:
        assert [await num_admitted(services, name, {REQUESTS: 1}, 2) for name in turns] == [1, 0]
        services.now_s += 5.0
    services.stop("a")
    await services.look()
    services.now_s += ALONE_S
    await services.tell()
    assert await num_admitted(services, "b", {REQUESTS: 1}, 20) == 12
    await services.look()  # it counts by itself from here on
    services.now_s += 5.0
    assert await num_admitted(services, "b", {REQUESTS: 1}, 2) == 1


async def test_a_database_whose_clock_is_set_back_refuses_nobody_for_longer(database: Database) -> None:
    services = Services(database, requests=12)
    await services.start("a", "b")
    assert await num_admitted(services, "a", {REQUESTS: 1}, 20) == 12
    services.set_s = -86_400.0
    for expected in (0, 1):
        assert await num_admitted(services, "b", {REQUESTS: 1}, 2) == expected
        services.now_s += 5.0
