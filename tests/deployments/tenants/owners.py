"""Services that share one database, without processes: each an owner of limits with one ingress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest
from sqlalchemy import Connection

from app.deployments.registry.database import Database
from app.deployments.tenants import limiter
from app.deployments.tenants.books import TenantBooks
from app.deployments.tenants.entries import Tenant
from app.deployments.tenants.lending import Grant, Owners, Want
from app.deployments.tenants.limiter import Limiter, Reservation
from app.deployments.tenants.limits import LimitReached, Meter
from app.deployments.tenants.metering import Charge, LedgerKey
from app.deployments.tenants.owning import LimitOwner
from app.engine.errors import NotReady
from tests.deployments.tenants.test_limiter import tenant

#: Nothing here is about how long a real database takes.
PATIENCE_S = 60.0


class OnTime(Database):
    """A database whose clock is the test's."""

    def now_s(self, _: Connection) -> float:
        return self.clock()


class Services:
    """Services on one database, each an owner with one ingress. All times are `now_s`."""

    def __init__(self, database: Database, **limits: int) -> None:
        self.now_s = 1_000_000_000.0
        self.tenant = tenant(**limits)
        self.database = database
        database.clock = lambda: self.now_s + self.set_s
        self.set_s = 0.0  # by how much the database's clock was set
        self.ahead_s: Counter[str] = Counter()  # by how much the clocks of some owners are ahead of it
        self.books = TenantBooks(database)
        self.is_away = False
        self.num_calls = 0
        self.living: set[str] = set()
        self.owners: dict[str, LimitOwner] = {}
        self.ingresses: dict[str, Limiter] = {}

    async def start(self, *names: str) -> list[Limiter]:
        """Each lives when the first of them looks who does."""
        self.living.update(names)
        for name in names:
            self.owners[name] = self._owner(name)
            self.ingresses[name] = Limiter(self._lend(name), f"ingress of {name}", lambda: self.now_s)
        await self.look()
        return [self.ingresses[name] for name in names]

    async def restart(self, name: str, life: str) -> None:
        """Its owner, which has another id in another life; the ingress stays."""
        self.living = self.living - {name} | {life}
        self.owners[name] = self._owner(life)
        await self.look()

    def stop(self, name: str) -> None:
        """Owner and ingress."""
        self.living.remove(name)
        del self.owners[name], self.ingresses[name]

    async def look(self) -> None:
        for name, owner in self.owners.items():
            await owner.follow(self.now_s + self.ahead_s[name])

    async def tell(self) -> None:
        for ingress in self.ingresses.values():
            await ingress.tell()

    def spend(self, cost_nanos: int, number: int) -> None:
        """In the ledger."""
        key = LedgerKey(int(self.now_s) // 60, "t", "k", "base", "", "completions")
        self.books.ledger.record("writer", number, [(key, Charge(1, 1, 0, 1, cost_nanos=cost_nanos))])

    def _owner(self, life: str) -> LimitOwner:
        def find(_: str) -> Tenant:
            return self.tenant

        def owners() -> Owners:
            return Owners(life, frozenset(self.living))

        return LimitOwner(find, self.books.ledger, self.books.shared_limits, owners, PATIENCE_S)

    def _lend(self, name: str) -> limiter.Lend:
        async def lend(holder: str, wants: Sequence[Want]) -> list[Grant]:
            self.num_calls += 1
            if self.is_away:
                raise NotReady("the registry's database does not answer")
            return await self.owners[name].lend(holder, wants, self.now_s + self.ahead_s[name])

        return lend


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


async def is_admitted(services: Services, name: str, needs: Mapping[Meter, int]) -> Reservation | None:
    try:
        return await services.ingresses[name].reserve(services.tenant, needs)
    except LimitReached:
        return None


async def num_admitted(services: Services, name: str, needs: Mapping[Meter, int], asks: int) -> int:
    return sum([await is_admitted(services, name, needs) is not None for _ in range(asks)])
