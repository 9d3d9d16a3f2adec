"""An ingress's side of limits: a request is admitted with units that were lent to this process, or not at all.

In: what a request needs of its tenant's meters. Out: a `Reservation`, or `LimitReached`. Units are taken from what this
process holds; what it lacks is asked of the owner, for all requests that wait at once. When a request ends, what it
reserved and did not use is there for the next. Rule: no unit admits two requests.

While the owner is away a process admits from a bucket of its own that is as large as the tenant's limit (of spend a
tenth), and says so when the owner is back: n ingresses overdraw a limit at most n times.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.deployments.rpc.background_tasks import Tasks
from app.deployments.tenancy.models import Tenant
from app.deployments.tenancy.quota.leases import LeaseGrant, LeaseRequest
from app.deployments.tenancy.quota.limits import (
    CONCURRENT_RETRY_S,
    PERIOD_S,
    GcraCounter,
    LimitKey,
    LimitReached,
    MeterKind,
    limit_of,
    refusal,
)
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: Units that nobody took for this long go back to their owner.
KEEP_S = 1.0
#: How often an ingress tells its owner what it holds and does not need.
TELL_INTERVAL_S = 0.5
#: A meter that has nothing in it is forgotten after this long.
FORGET_S = 60.0
#: An owner that has not answered by then is away.
OWNER_TIMEOUT_S = 1.0
#: Part of the month's money that one ingress may spend while the owner is away.
SPEND_OVERDRAFT = 0.1

#: (who, wants) -> grants, one for each. Raises NotReady while the owner is away.
Lend = Callable[[str, Sequence[LeaseRequest]], Awaitable[Sequence[LeaseGrant]]]


class RejectedRequest(NamedTuple):
    """Why a request was refused, or would have been if the tenant's limits were enforced."""

    kind: MeterKind
    is_enforced: bool


class Allowance(NamedTuple):
    """What is said of one limit with an answer: the limit, what is left, and when all of it will be there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class _Lease:
    """What this process holds of one meter, and what it knows of the owner's count.

    `units` may be taken, `reserved` are of requests that run, `used` are gone for good (spend only, since the process
    began). `unasked` were used without the owner, which has not heard of it. `own` stands in for it.
    """

    units: int = 0
    reserved: int = 0
    used: int = 0
    unasked: int = 0
    taken_s: float = -math.inf
    limit: int = 0
    remaining: int = 0
    told_s: float = -math.inf
    own: GcraCounter | None = None
    overdrawn: int = 0
    told_holding: int = 0
    told_used: int = 0


@dataclass(eq=False, slots=True)
class Reservation:
    """What a request holds until it ends. `is_beyond`: nothing, because it was beyond a limit that is not enforced."""

    units: Mapping[LimitKey, int]
    settled: bool = False
    is_beyond: bool = False

    def parted(self, kinds: Collection[MeterKind]) -> tuple[Reservation, Reservation]:
        """The same in two that are settled apart: all but these kinds, and these."""
        rest = {meter: amount for meter, amount in self.units.items() if meter.kind not in kinds}
        part = {meter: amount for meter, amount in self.units.items() if meter.kind in kinds}
        return Reservation(rest, self.settled, self.is_beyond), Reservation(part, self.settled, self.is_beyond)


class _Waiter(NamedTuple):
    needs: Mapping[LimitKey, int]
    answer: asyncio.Future[None]


class RateLimiter:
    """One per ingress, on its event loop. `clock` gives seconds that never go back; `holder` is this ingress's id."""

    def __init__(self, lend: Lend, holder: str, clock: Callable[[], float]) -> None:
        self._lend = lend
        self._holder = holder
        self._clock = clock
        self._pools: dict[LimitKey, _Lease] = {}
        self._waiters: list[_Waiter] = []
        self._asking: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._tasks = Tasks()
        self.refused: Counter[RejectedRequest] = Counter()

    async def reserve(
        self, tenant: Tenant, needs: Mapping[LimitKey, int], held: Reservation | None = None
    ) -> Reservation:
        """Raises LimitReached. Of a tenant whose limits are not enforced nothing is refused.

        `get_object` is a part of what is needed that the request has: the reservation takes it over. When this raises, it is
        still whose it was. A request that was counted as refused for that part already is not counted again.
        """
        if held is not None and held.is_beyond:
            return held
        if held is not None and not held.settled:
            reservation = await self.reserve(tenant, _without(needs, held.units))
            if reservation.is_beyond:
                self.settle(held, {})
                return reservation
            held.settled = True
            return Reservation(needs)
        if not needs:
            return Reservation({}, settled=True)
        try:
            for meter, amount in needs.items():
                limit = limit_of(tenant.limits, meter) or 0
                self._pool(meter).limit = limit
                if amount > limit:
                    raise refusal(meter, amount, limit, math.inf)
            if not self._take(needs):
                await self._wait(needs)
        except LimitReached as error:
            self.refused[RejectedRequest(error.kind, tenant.enforce)] += 1
            if tenant.enforce:
                raise
            return Reservation({}, settled=True, is_beyond=True)
        return Reservation(needs)

    def settle(self, reservation: Reservation, actual: Mapping[LimitKey, int]) -> None:
        """A request has ended and took so much (of a meter that is left out: all that it reserved); once."""
        if reservation.settled:
            return
        reservation.settled = True
        now_s = self._clock()
        for meter, reserved in reservation.units.items():
            pool = self._pool(meter)
            used = 0 if meter.kind == "concurrent" else min(reserved, actual.get(meter, reserved))
            pool.reserved -= reserved
            pool.used += used if meter.kind == "spend" else 0
            if reserved > used:
                pool.units += reserved - used
                pool.taken_s = now_s

    def allowance(self, meter: LimitKey) -> Allowance | None:
        """What this process knows of a rate now; None of one that it has not asked for."""
        pool = self._pools.get(meter)
        if pool is None or not pool.limit or meter.kind not in PERIOD_S or pool.told_s == -math.inf:
            return None
        refilled = (self._clock() - pool.told_s) * pool.limit / PERIOD_S[meter.kind]
        remaining = max(0, min(pool.limit, int(pool.remaining + pool.units + refilled)))
        return Allowance(pool.limit, remaining, (pool.limit - remaining) * PERIOD_S[meter.kind] / pool.limit)

    async def keep_telling(self) -> None:
        """Give back what is not needed, and say what is held, until cancelled."""
        while True:
            await asyncio.sleep(TELL_INTERVAL_S)
            await self.tell()

    async def tell(self) -> None:
        """Once. What the owner does not hear is told the next time."""
        if self._pools:
            await self._ask([])

    async def close(self) -> None:
        await self._tasks.close()

    # -- what is held -----------------------------------------------------------------------------------

    def _pool(self, meter: LimitKey) -> _Lease:
        pool = self._pools.get(meter)
        if pool is None:
            pool = self._pools[meter] = _Lease()
        return pool

    def _take(self, needs: Mapping[LimitKey, int]) -> bool:
        """All of it or nothing."""
        pools = [(self._pool(meter), amount) for meter, amount in needs.items()]
        if any(pool.units < amount for pool, amount in pools):
            return False
        now_s = self._clock()
        for pool, amount in pools:
            pool.units -= amount
            pool.reserved += amount
            pool.taken_s = now_s
        return True

    def _put_back(self, needs: Mapping[LimitKey, int]) -> None:
        for meter, amount in needs.items():
            pool = self._pool(meter)
            pool.units += amount
            pool.reserved -= amount

    # -- asking -----------------------------------------------------------------------------------------

    async def _wait(self, needs: Mapping[LimitKey, int]) -> None:
        waiter = _Waiter(needs, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        if self._asking is None:
            self._asking = self._tasks.start(self._ask_for_all())
        try:
            await waiter.answer
        except asyncio.CancelledError:
            if waiter.answer.done() and not waiter.answer.cancelled() and waiter.answer.exception() is None:
                self._put_back(needs)  # it was admitted while it left
            raise

    async def _ask_for_all(self) -> None:
        """Ask for those who wait, again and again until nobody does."""
        try:
            while self._waiters:
                waiters, self._waiters = self._waiters, []
                is_away = not await self._ask([waiter.needs for waiter in waiters])
                refused = [waiter for waiter in waiters if not self._answer(waiter, is_away=is_away)]
                for waiter in refused:  # what was lent for them may help others: it goes back at once
                    for meter in waiter.needs:
                        self._pool(meter).taken_s = -math.inf
                if refused and not self._waiters:
                    await self._ask([], [meter for waiter in refused for meter in waiter.needs])
        finally:
            self._asking = None

    def _answer(self, waiter: _Waiter, *, is_away: bool) -> bool:
        """Whether the request is admitted, or nobody waits for it any more."""
        if waiter.answer.done():
            return True
        short = self._shortage(waiter.needs, is_away=is_away)
        if short is None:
            assert self._take(waiter.needs), "there is enough of each"
            waiter.answer.set_result(None)
            return True
        meter, wait_s = short
        waiter.answer.set_exception(refusal(meter, waiter.needs[meter], self._pool(meter).limit, wait_s))
        return False

    def _shortage(self, needs: Mapping[LimitKey, int], *, is_away: bool) -> tuple[LimitKey, float] | None:
        """The meter that a request has to wait longest for, and how long; None when there is enough of each."""
        short: list[tuple[LimitKey, float]] = []
        for meter, amount in needs.items():
            pool = self._pool(meter)
            missing = amount - pool.units
            if missing <= 0 or (is_away and self._overdraw(meter, pool, missing)):
                continue
            if meter.kind not in PERIOD_S:
                short.append((meter, math.inf if meter.kind == "spend" else CONCURRENT_RETRY_S))
                continue
            wait_s = (missing - pool.remaining) * PERIOD_S[meter.kind] / max(1, pool.limit)
            short.append((meter, max(0.001, wait_s)))
        return max(short, key=lambda item: item[1]) if short else None

    def _overdraw(self, meter: LimitKey, pool: _Lease, missing: int) -> bool:
        """Add units that the owner has not lent: of rates from a bucket of this process's own, of counts to a bound."""
        if meter.kind in PERIOD_S:
            if pool.own is None:
                pool.own = GcraCounter(pool.limit, PERIOD_S[meter.kind])
            if pool.own.remaining(self._clock()) < missing:
                return False
            pool.unasked += pool.own.take(missing, self._clock())
        else:
            bound = pool.limit * SPEND_OVERDRAFT if meter.kind == "spend" else pool.limit
            if pool.overdrawn + missing > bound:
                return False
            pool.overdrawn += missing
        pool.units += missing
        return True

    async def _ask(self, needs: Sequence[Mapping[LimitKey, int]], meters: Collection[LimitKey] | None = None) -> bool:
        """Tell the owner what is held here and get what it lends; False while it is away.

        Of what is needed, or of these meters, or of all: with thousands of tenants not each question is about all.
        """
        async with self._one_at_a_time:
            total: dict[LimitKey, int] = {}
            least: dict[LimitKey, int] = {}
            for each in needs:
                for meter, amount in each.items():
                    total[meter] = total.get(meter, 0) + amount
                    least[meter] = min(amount, least.get(meter, amount))
            asked = dict.fromkeys(total or meters or self._pools)
            wants = [
                want
                for meter in asked
                if (want := self._want(meter, self._pool(meter), total.get(meter, 0), least.get(meter, 0))) is not None
            ]
            grants = await self._lent(wants)
            if grants is None:
                for want in wants:
                    pool = self._pool(want.meter)
                    pool.units += want.returned
                    pool.unasked += want.unasked
                return False
            for want, grant in zip(wants, grants, strict=True):
                pool = self._pool(want.meter)
                pool.units += grant.granted
                pool.remaining, pool.told_s = grant.remaining, self._clock()
                pool.own, pool.overdrawn = None, 0
                pool.told_holding, pool.told_used = want.holding + grant.granted, want.used
                if grant.granted:
                    pool.taken_s = pool.told_s
            if not total:
                self._forget_idle()
            return True

    async def _lent(self, wants: Sequence[LeaseRequest]) -> Sequence[LeaseGrant] | None:
        """A grant for each; None while the owner is away, which one that answers otherwise than it should is, too."""
        try:
            async with asyncio.timeout(OWNER_TIMEOUT_S):
                grants = await self._lend(self._holder, wants)
            if len(grants) == len(wants):
                return grants
            logger.error("limits are kept by this ingress alone for now: %d answers to %d", len(grants), len(wants))
        except (NotReady, TimeoutError) as error:
            words = str(error) or f"their owner has not answered for {OWNER_TIMEOUT_S:g} s"
            logger.warning("limits are kept by this ingress alone for now: %s", words)
        except Exception:  # an owner of another release may raise anything, and requests wait for an answer
            logger.exception("limits are kept by this ingress alone for now")
        return None

    def _forget_idle(self) -> None:
        """Meters that nobody has used for a minute, and of which nothing is left to tell."""
        if self._waiters:
            return
        now_s = self._clock()
        for meter, pool in list(self._pools.items()):
            is_empty = not (pool.units or pool.reserved or pool.used or pool.unasked or pool.told_holding)
            if is_empty and now_s - pool.taken_s > FORGET_S and now_s - pool.told_s > FORGET_S:
                del self._pools[meter]

    def _want(self, meter: LimitKey, pool: _Lease, need: int, least: int) -> LeaseRequest | None:
        """What is said of one meter; None if there is nothing to say."""
        is_idle = not need and self._clock() - pool.taken_s >= KEEP_S
        missing = max(0, need - pool.units)
        if meter.kind in PERIOD_S:
            returned, unasked = pool.units if is_idle else 0, pool.unasked
            if not (missing or returned or unasked):
                return None
            pool.units -= returned
            pool.unasked = 0
            return LeaseRequest(meter, missing, max(0, least - pool.units), returned, unasked)
        if not need and (is_idle or meter.kind == "concurrent"):
            pool.units = 0  # totals are told: what is not held is given back
        holding = pool.units + pool.reserved
        if not (missing or holding or pool.told_holding or pool.used != pool.told_used):
            return None
        return LeaseRequest(meter, missing, max(0, least - pool.units), holding=holding, used=pool.used)


def _without(needs: Mapping[LimitKey, int], held: Mapping[LimitKey, int]) -> dict[LimitKey, int]:
    return {meter: amount - held.get(meter, 0) for meter, amount in needs.items() if amount > held.get(meter, 0)}
