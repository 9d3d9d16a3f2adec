"""The quota service with a real ledger: exact over all ingresses of a service, and money is what the ledger knows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest
from sqlalchemy import Connection

from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.tenancy.models import RateLimit, Tenant, TenantLimits
from app.deployments.tenancy.quota import rate_limiter
from app.deployments.tenancy.quota.leases import HOLDER_TIMEOUT_S, LeaseGrant, LeaseRequest, QuotaService
from app.deployments.tenancy.quota.limits import BudgetCounter, LimitError, LimitKey, SpendLimitError
from app.deployments.tenancy.quota.rate_limiter import RateLimiter, Reservation
from app.deployments.tenancy.usage.flusher import LedgerKey, UsageRecord
from app.deployments.tenancy.usage.ledger import Ledger
from tests.deployments.tenancy.quota.test_rate_limiter import CONCURRENT, REQUESTS, SPEND, TOKENS, tenant
from tests.postgres import PostgresServer, find_postgres

PROGRAMS = find_postgres()
DAY = LimitKey("t", "day", "base")
#: Nothing here is about how long a real database takes.
PATIENCE_S = 60.0


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
    monkeypatch.setattr(rate_limiter, "OWNER_TIMEOUT_S", PATIENCE_S)
    database = Database(url, secrets.token_hex(32), lambda: 1_000_000_000.0)
    yield database
    database.close()


class Service:
    """The owner of one service's limits with its ingresses. All times are `now_s`."""

    def __init__(self, database: Database, *ingresses: str, **limits: int) -> None:
        self.now_s = 1_000_000_000.0
        self.tenant = tenant(**limits)
        self.ledger = Ledger(database)
        self.num_calls = 0
        self.ingresses = {name: RateLimiter(self._lend, name, lambda: self.now_s) for name in ingresses}
        self.restart()

    def restart(self) -> None:
        """The owner; its ingresses stay."""
        self.owner = QuotaService(lambda _: self.tenant, self.ledger)

    async def lease(self, holder: str, *wants: LeaseRequest) -> list[LeaseGrant]:
        return await self.owner.lease(holder, wants, self.now_s)

    async def reconcile(self) -> None:
        await self.owner.reconcile(self.now_s)

    async def report(self) -> None:
        for ingress in self.ingresses.values():
            await ingress.report()

    def spend(self, cost_nanos: int, number: int) -> None:
        """In the ledger."""
        key = LedgerKey(int(self.now_s) // 60, "t", "k", "base", "", "completions")
        self.ledger.record("writer", number, [(key, UsageRecord(1, 1, 0, 1, cost_nanos=cost_nanos))])

    async def is_admitted(self, name: str, needs: Mapping[LimitKey, int]) -> Reservation | None:
        try:
            return await self.ingresses[name].reserve(self.tenant, needs)
        except LimitError:
            return None

    async def num_admitted(self, name: str, needs: Mapping[LimitKey, int], asks: int) -> int:
        return sum([await self.is_admitted(name, needs) is not None for _ in range(asks)])

    async def _lend(self, holder: str, wants: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        self.num_calls += 1
        return await self.owner.lease(holder, wants, self.now_s)


async def test_what_was_spent_while_there_was_no_owner_counts_once_the_ledger_has_it(database: Database) -> None:
    """Replicas keep what they count until the store is back, which reads the ledger before it has that."""
    service = Service(database, "a", spend_cents=1)
    held = await service.is_admitted("a", {SPEND: 5_000_000})
    assert held is not None
    service.ingresses["a"].settle(held, {SPEND: 5_000_000})
    service.restart()
    service.now_s += 2.0
    await service.report()
    service.spend(5_000_000, 1)
    service.now_s += 10.0
    await service.reconcile()
    assert await service.num_admitted("a", {SPEND: 1_000_000}, 20) == 5


@contextmanager
def transactions() -> Iterator[list[str | None]]:
    """What is opened meanwhile: of each transaction what it locks."""
    opened: list[str | None] = []
    open_one = Database._transaction

    def noting(database: Database, *, lock: str | None) -> AbstractContextManager[Connection]:
        opened.append(lock)
        return open_one(database, lock=lock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "_transaction", noting)
        yield opened


@pytest.mark.parametrize("meter", [REQUESTS, CONCURRENT, DAY])
@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_a_limit_of_one_is_every_ingress_s_and_one_in_all(database: Database, meter: LimitKey, name: str) -> None:
    service = Service(database, *"abc", requests=1, max_concurrent=1, day=1)
    held = await service.is_admitted(name, {meter: 1})
    assert held is not None
    assert [await service.is_admitted(other, {meter: 1}) for other in "abc"] == [None] * 3
    service.ingresses[name].settle(held, {})
    await service.report()
    service.now_s += 86_400.0
    others = [await service.is_admitted(other, {meter: 1}) for other in "abc"]
    assert sum(each is not None for each in others) == 1


@pytest.mark.parametrize("needs", [{TOKENS: 1000}, {SPEND: 10_000_000}])
async def test_a_request_that_needs_the_whole_limit_is_admitted_anywhere(
    database: Database, needs: dict[LimitKey, int]
) -> None:
    service = Service(database, *"abc", tokens=1000, spend_cents=1)
    for name, ingress in service.ingresses.items():
        held = await service.is_admitted(name, needs)
        assert held is not None
        assert [await service.is_admitted(other, needs) for other in "abc"] == [None] * 3
        ingress.settle(held, dict.fromkeys(needs, 0))
        service.now_s += 2.0
        await service.report()


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
async def test_a_thousand_requests_over_three_ingresses_admit_exactly_the_limit(
    database: Database, limits: dict[str, int], meter: LimitKey, amount: int
) -> None:
    service = Service(database, *"abc", **limits)
    asks = [service.is_admitted("abc"[index % 3], {meter: amount}) for index in range(1000)]
    results = await asyncio.gather(*asks)
    assert sum(result is not None for result in results) == 10
    assert service.num_calls < 30, "those who wait are asked for together"


async def test_the_database_is_read_only_for_money(database: Database) -> None:
    service = Service(database, "a", requests=10, max_concurrent=10, spend_cents=1)
    with transactions() as opened:
        assert await service.num_admitted("a", {REQUESTS: 1, CONCURRENT: 1}, 20) == 10
        await service.report()
        assert opened == []
        assert await service.num_admitted("a", {SPEND: 1_000_000}, 11) == 10
    assert opened == [None], "once a month and tenant"


async def test_two_services_on_one_database_each_allow_the_full_limit(database: Database) -> None:
    for service in (Service(database, "a", requests=10), Service(database, "a", requests=10)):
        assert await service.num_admitted("a", {REQUESTS: 1}, 20) == 10


async def test_what_an_ingress_that_died_had_spent_without_a_word_is_learnt_from_the_ledger(database: Database) -> None:
    service = Service(database, spend_cents=1)
    owner = service.owner
    (grant,) = await service.lease("dead", LeaseRequest(SPEND, 6_000_000, 6_000_000))
    service.now_s += HOLDER_TIMEOUT_S + 1
    await service.lease("alive", LeaseRequest(SPEND))
    assert owner.remaining_spend("t") == 10_000_000 - grant.granted
    service.spend(2_000_000, 1)
    await service.reconcile()
    assert owner.remaining_spend("t") == 8_000_000
    service.spend(3_000_000, 2)  # a replica went on for it, and for another, which says so
    service.now_s += 2.0
    await service.reconcile()
    await service.lease("alive", LeaseRequest(SPEND, used=1_000_000))
    assert owner.remaining_spend("t") == 4_000_000
    service.now_s += 2.0
    await service.reconcile()
    assert owner.remaining_spend("t") == 5_000_000
    await service.lease("dead", LeaseRequest(SPEND, holding=500_000, used=4_000_000))  # it was silent, not dead
    assert owner.remaining_spend("t") == 4_500_000


async def test_the_ledger_is_asked_less_and_less_often(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    service, asked_s = Service(database, spend_cents=1), list[float]()
    spend_by_project = service.ledger.spend_by_project

    def noting(project_ids: Collection[str], now_s: float) -> dict[str, int]:
        asked_s.append(now_s)
        return spend_by_project(project_ids, now_s)

    await service.lease("one", LeaseRequest(SPEND, 1, 1))
    monkeypatch.setattr(service.ledger, "spend_by_project", noting)
    for ingress in ("one", "two"):
        await service.lease(ingress, LeaseRequest(SPEND, 1, 1))
        for _ in range(1800):
            service.now_s += 2.0
            await service.lease("alive")
            await service.reconcile()
    first = [each for each in asked_s if each < asked_s[0] + 3590.0]
    assert 20 < len(first) < 60
    assert first[8] - first[0] < 20.0
    assert asked_s[-1] - asked_s[-2] < 500.0
    assert abs(len(asked_s) - 2 * len(first)) < 5, "each death is followed up"


async def test_an_owner_that_restarts_learns_what_is_held_and_what_was_spent(database: Database) -> None:
    service = Service(database, *"ab", max_concurrent=4, spend_cents=1)
    held = [await service.is_admitted("a", {CONCURRENT: 1, SPEND: 2_500_000}) for _ in range(3)]
    for number, reservation in enumerate(held[1:]):
        assert reservation is not None
        service.ingresses["a"].settle(reservation, {SPEND: 2_500_000})
        service.spend(2_500_000, number + 1)
    service.restart()
    service.now_s += 2.0  # units that were lent ahead go back
    await service.report()
    assert await service.num_admitted("b", {CONCURRENT: 1}, 9) == 3
    assert await service.num_admitted("b", {SPEND: 2_500_000}, 9) == 1


async def test_the_ledger_says_what_was_spent_before_and_a_new_month_has_new_money(database: Database) -> None:
    service = Service(database, *"ab", spend_cents=1)
    service.spend(8_000_000, 1)
    assert await service.num_admitted("b", {SPEND: 1_000_000}, 9) == 2
    with pytest.raises(SpendLimitError):
        await service.ingresses["a"].reserve(service.tenant, {SPEND: 1_000_000})
    assert service.owner.remaining_spend("t") == 0
    service.now_s += 31 * 86_400
    assert await service.num_admitted("a", {SPEND: 1_000_000}, 11) == 10


async def test_what_is_left_is_what_all_ingresses_have_not_taken(database: Database) -> None:
    service = Service(database, *"ab", requests=10, max_concurrent=5, spend_cents=1)
    service.spend(4_000_000, 1)
    for name, asks in (("a", 2), ("b", 1)):
        assert await service.num_admitted(name, {REQUESTS: 1, CONCURRENT: 1}, asks) == asks
    left = {meter: remaining for meter, _, remaining in await service.owner.remaining("t", service.now_s)}
    assert left == {REQUESTS: 7, CONCURRENT: 2, SPEND: 6_000_000}


async def test_a_limit_that_is_changed_holds_for_all(database: Database) -> None:
    service = Service(database, *"ab", requests=10)
    assert await service.num_admitted("a", {REQUESTS: 1}, 10) == 10
    service.tenant = Tenant("t", "t", 0.0, limits=TenantLimits({"base": RateLimit(12)}))
    assert await service.num_admitted("b", {REQUESTS: 1}, 10) == 2
    service.tenant = Tenant("t", "t", 0.0)
    assert await service.lease("i", LeaseRequest(REQUESTS, 5)) == [LeaseGrant(5, 0)]


async def test_ingresses_and_months_that_are_over_are_not_kept(database: Database) -> None:
    """Of money each ingress is kept until the month is over: what it reports late counts."""
    service = Service(database, max_concurrent=1, spend_cents=1)
    for _ in range(12):
        for number in range(3):
            ingress = f"ingress {service.now_s} {number}"
            await service.lease(ingress, LeaseRequest(CONCURRENT, 1, 1), LeaseRequest(SPEND, used=1))
            service.now_s += HOLDER_TIMEOUT_S + 1
        await service.lease(ingress, LeaseRequest(SPEND, used=4))
        assert service.owner.remaining_spend("t") == 10_000_000 - 3
        service.now_s += 31 * 86_400
    assert len(service.owner._spent) <= 2
    counters = service.owner._lessor._counters
    storage = {meter: len(counter.used_by) for meter, counter in counters.items() if isinstance(counter, BudgetCounter)}
    assert storage == {CONCURRENT: 0, SPEND: 3}
