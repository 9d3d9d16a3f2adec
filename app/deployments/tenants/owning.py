"""Who counts what is taken of limits: this process in its memory, or all owners of one registry in its database.

In: what ingresses want, and who else owns these limits now. Out: grants. One owner counts by itself and asks no
database. As soon as it sees another, it adds what it has counted to the database, where all of them count from then
on; one that has seen no other for `ALONE_S` takes the counts back. Rule: calls to the database take turns, and a call
that has taken longer than an ingress waits is NotReady and has lent nothing: the ingress then goes on by itself, within
the bounds of `limiter`. Where is counted changes however long that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from app.deployments.links.tasks import Tasks
from app.deployments.tenants.entries import Tenant
from app.deployments.tenants.lending import Asked, Counter, Grant, Lender, Owners, Want
from app.deployments.tenants.limits import Meter, month_of
from app.engine.errors import NotReady

if TYPE_CHECKING:  # a database: a process that only calls the owner starts without
    from app.deployments.tenants.ledger import Ledger
    from app.deployments.tenants.shared_limits import SharedLimits

T = TypeVar("T")

#: An owner counts by itself again when it has seen no other for so long: longer than a database restarts.
ALONE_S = 60.0
#: How long a call waits for the database: less than an ingress waits for its owner (`limiter.OWNER_TIMEOUT_S`).
DATABASE_PATIENCE_S = 0.5
#: Of ingresses that are gone so many are looked for at a time, and of so many rows they are removed at a time: a small
#: part of `DATABASE_PATIENCE_S`.
SWEPT_HOLDERS, SWEPT_ROWS = 50, 200
#: The ledger is asked what ingresses that are gone had spent whenever this part more time has passed since they are.
RECKON_PART = 1 / 8


class LimitOwner:
    """One event loop. `tenant` finds a tenant; `owners` (called in a thread, may raise NotReady) says who lives."""

    def __init__(
        self,
        tenant: Callable[[str], Tenant | None],
        ledger: Ledger,
        shared: SharedLimits,
        owners: Callable[[], Owners],
        patience_s: float = DATABASE_PATIENCE_S,
    ) -> None:
        self._lender = Lender(tenant, lambda tenant_id, month: self._spent[month][tenant_id])
        self._ledger = ledger
        self._shared = shared
        self._look = owners
        self.patience_s = patience_s
        self._spent: dict[str, dict[str, int]] = {}  # by month and tenant: as the ledger said when it was first asked
        self._owners = Owners()
        self._is_shared = False
        self._seen_s = 0.0  # when another owner was there
        self._brought: dict[Meter, Counter] = {}  # counted here, and not in the database yet
        self._gone: set[str] = set()  # ingresses that the database does not know to be gone
        self._lost_s = 0.0  # when ingresses may have gone with another owner
        self._reckoned_s = 0.0
        self._turn = asyncio.Lock()  # of calls to the database, and of what changes where is counted
        self._tasks = Tasks()

    async def follow(self, now_s: float) -> None:
        """See who else lives; called every few seconds. Raises NotReady, and then everything stays as it was."""
        before, self._owners = self._owners, await asyncio.to_thread(self._look)
        if before.living - self._owners.living:
            self._lost_s = now_s
        if len(self._owners.living) > 1:
            self._seen_s = now_s
            if not self._is_shared:
                await self._in_turn(lambda _: self._share(now_s))
        elif self._is_shared and now_s - self._seen_s >= ALONE_S:
            await self._in_turn(lambda _: self._count_alone(now_s))
        if self._is_shared:
            self._gone.update(self._lender.bury(now_s))
            await self._in_turn(lambda _: self._tell(now_s))
            await self._sweep(now_s)
        await self._reckon(now_s)

    async def lend(self, holder: str, wants: Sequence[Want], now_s: float) -> list[Grant]:
        """As `Lender.lend`. Raises NotReady while what all owners count together cannot be had."""
        if not self._is_shared:
            await self._look_up_spent(wants, now_s)
        if not self._is_shared:
            return self._lender.lend(holder, wants, now_s)
        self._lender.hear(holder, now_s)
        self._gone.discard(holder)
        if not wants:
            return []
        return await self._in_turn(lambda deadline_s: self._lend(holder, wants, now_s, deadline_s))

    async def left(self, tenant_id: str, now_s: float) -> list[tuple[Meter, int, int]]:
        """As `Lender.left`."""
        meters = self._lender.meters(tenant_id)
        if not self._is_shared:
            await self._look_up_spent([Want(meter) for meter in meters], now_s)
        if not self._is_shared:
            return self._lender.left(tenant_id, now_s)
        limits = {meter: self._lender.limit(meter) or 0 for meter in meters}
        left = await asyncio.to_thread(self._shared.left, self._all_owners(), limits, now_s)
        return [(meter, limits[meter], remaining) for meter, remaining in zip(meters, left, strict=True)]

    async def remaining_spend(self, tenant_id: str, now_s: float) -> int | None:
        """As `Lender.remaining_spend`."""
        if not self._is_shared:
            return self._lender.remaining_spend(tenant_id)
        left = await self.left(tenant_id, now_s)
        return next((remaining for meter, _, remaining in left if meter.kind == "spend"), None)

    async def close(self) -> None:
        await self._tasks.close()

    async def _look_up_spent(self, wants: Sequence[Want], now_s: float) -> None:
        month = month_of(now_s)
        if month not in self._spent:  # the one before stays: calls that began in it may not have ended
            self._spent = {each: self._spent[each] for each in sorted(self._spent)[-1:]} | {month: {}}
        spent = self._spent[month]
        for tenant_id in (want.meter.tenant_id for want in wants if want.meter.kind == "spend"):
            if tenant_id not in spent:
                spent[tenant_id] = await asyncio.to_thread(self._ledger.spent, tenant_id, now_s)

    async def _sweep(self, now_s: float) -> None:
        """Tell the database which ingresses are gone: other owners count what they held until it knows.

        Whoever is waiting for a grant has its turn between two batches. Rows that were swept name nobody who is gone,
        so one that was interrupted is gone on with by the next.
        """
        gone = sorted(self._gone)[:SWEPT_HOLDERS]
        if not gone:
            return
        meters = await asyncio.to_thread(self._shared.held_by, gone)
        for batch in (meters[start : start + SWEPT_ROWS] for start in range(0, len(meters), SWEPT_ROWS)):
            await self._in_turn(partial(self._forget, batch, now_s))
        self._gone.difference_update(gone)

    async def _reckon(self, now_s: float) -> None:
        """Learn from the ledger what ingresses that are gone had spent without a word.

        What replicas still compute for them, and what waits to be written, comes later: it is asked again, until the
        month is over, less and less often.
        """
        gone_s = max(self._lost_s, self._lender.buried_s)
        if not gone_s or now_s - self._reckoned_s < (self._reckoned_s - gone_s) * RECKON_PART:
            return
        if self._is_shared:
            tenant_ids = await asyncio.to_thread(self._shared.left_behind, self._all_owners(), now_s)
        else:
            tenant_ids = self._lender.left_behind()
        in_ledger = await asyncio.to_thread(self._ledger.spent_by, tenant_ids, now_s) if tenant_ids else {}
        if not self._is_shared:
            self._lender.reckon(in_ledger, now_s)
        else:
            for batch in (tenant_ids[start : start + SWEPT_ROWS] for start in range(0, len(tenant_ids), SWEPT_ROWS)):
                spent = {tenant_id: in_ledger[tenant_id] for tenant_id in batch}
                await self._in_turn(partial(self._book, spent, now_s))
        self._reckoned_s = now_s

    def _all_owners(self) -> Owners:
        return self._owners._replace(gone=frozenset(self._gone))

    # -- in turn ------------------------------------------------------------------------------------------

    async def _in_turn(self, work: Callable[[float], Awaitable[T]]) -> T:
        """Do work when everything before it is done. It is done to its end, also when nobody waits for it any more."""
        deadline_s = self._shared.monotonic() + self.patience_s

        async def work_and_leave() -> T:
            try:
                return await work(deadline_s)
            finally:
                self._turn.release()

        try:
            async with asyncio.timeout(self.patience_s):
                await self._turn.acquire()
                return await asyncio.shield(self._tasks.start(work_and_leave()))
        except TimeoutError as error:
            raise NotReady("the registry's database has not answered in time for limits; ask again") from error

    async def _share(self, now_s: float) -> None:
        self._is_shared, self._lost_s = True, now_s
        self._brought |= self._lender.hand_over(now_s)
        await self._tell(now_s)

    async def _tell(self, now_s: float) -> None:
        """What the database does not know yet."""
        if self._brought:
            await asyncio.to_thread(self._shared.bring, self._owners, self._brought, now_s)
            self._brought = {}

    async def _forget(self, meters: Sequence[Meter], now_s: float, _: float) -> None:
        if self._is_shared:  # still, since it waits
            await asyncio.to_thread(self._shared.forget, self._all_owners(), meters, now_s)

    async def _book(self, in_ledger: Mapping[str, int], now_s: float, _: float) -> None:
        if self._is_shared:  # still, since it waits
            await asyncio.to_thread(self._shared.reckon, self._all_owners(), in_ledger, now_s)

    async def _count_alone(self, now_s: float) -> None:
        await self._tell(now_s)
        counters = await asyncio.to_thread(self._shared.take, self._all_owners(), now_s)
        self._gone.clear()
        self._spent.clear()  # of what others have spent since
        self._lender.take_over(counters, now_s)
        self._is_shared, self._lost_s = False, now_s

    async def _lend(self, holder: str, wants: Sequence[Want], now_s: float, deadline_s: float) -> list[Grant]:
        if not self._is_shared:  # since it waits
            await self._look_up_spent(wants, now_s)
            return self._lender.lend(holder, wants, now_s)
        await self._tell(now_s)
        limits = [self._lender.limit(want.meter) for want in wants]
        asked = [(want, limit) for want, limit in zip(wants, limits, strict=True) if limit is not None]
        its = Asked(holder, [want for want, _ in asked], [limit for _, limit in asked])
        owners = self._all_owners()
        grants = iter(await asyncio.to_thread(self._shared.lend, owners, its, now_s, deadline_s) if asked else [])
        return [
            Grant(want.need, 0) if limit is None else next(grants) for want, limit in zip(wants, limits, strict=True)
        ]
