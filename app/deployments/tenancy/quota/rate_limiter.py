"""Rate limiter of one ingress: a request is admitted with units that are leased to this process, or not at all.

A request reserves what it costs. Units come from the leases of this process; missing ones are requested from the
lessor, for all waiting requests at once. Reserved units that a request did not use return to the lease when it ends. No
unit admits two requests.

While the lessor is unavailable a process admits from an own bucket as large as the limit (for spend, a tenth of it) and
reports that use later: n ingresses exceed a limit at most n times.
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
    LimitError,
    LimitKey,
    LimitKind,
    limit_of,
    refusal,
)
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: Units unused for this long are returned to the lessor.
IDLE_RETURN_S = 1.0
#: How often an ingress reports to the lessor.
REPORT_INTERVAL_S = 0.5
#: An empty lease is dropped after this long.
IDLE_DROP_S = 60.0
#: A lessor that has not answered by then is unavailable.
OWNER_TIMEOUT_S = 1.0
#: It is not called again until it has answered, or for this long: it carries out late what was asked of it.
LATE_ANSWER_S = 10.0
#: Fraction of the monthly spend limit that one ingress may use while the lessor is unavailable.
SPEND_OVERDRAFT = 0.1

#: (holder, requests) -> one grant for each. Raises NotReady while the lessor is unavailable.
LeaseCall = Callable[[str, Sequence[LeaseRequest]], Awaitable[Sequence[LeaseGrant]]]


class RejectedRequest(NamedTuple):
    """Why a request was rejected, or would have been if the tenant's limits were enforced."""

    kind: LimitKind
    is_enforced: bool


class Allowance(NamedTuple):
    """The rate-limit headers of an answer: the limit, what remains, and when it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class _Lease:
    """This process's lease of one limit, and what it knows of the lessor's count.

    `units` may be taken, `reserved` belong to running requests, `used` are spent for good (spend only, since the
    process started). `offline_used` were used while the lessor was unavailable and are not reported yet;
    `offline_counter` stands in for it.
    """

    units: int = 0
    reserved: int = 0
    used: int = 0
    offline_used: int = 0
    taken_s: float = -math.inf
    limit: int = 0
    remaining: int = 0
    answered_s: float = -math.inf
    offline_counter: GcraCounter | None = None
    overdraft: int = 0
    reported_holding: int = 0
    reported_used: int = 0


@dataclass(eq=False, slots=True)
class Reservation:
    """Units of one request until it ends. `is_over_limit`: none, because it exceeded a limit that is not enforced."""

    units: Mapping[LimitKey, int]
    is_settled: bool = False
    is_over_limit: bool = False

    def split(self, kinds: Collection[LimitKind]) -> tuple[Reservation, Reservation]:
        """The same in two parts that are settled separately: all but these kinds, and these."""
        rest = {key: amount for key, amount in self.units.items() if key.kind not in kinds}
        part = {key: amount for key, amount in self.units.items() if key.kind in kinds}
        return Reservation(rest, self.is_settled, self.is_over_limit), Reservation(
            part, self.is_settled, self.is_over_limit
        )


class _LateCall(NamedTuple):
    """A call that the lessor has not answered in time, and may carry out later."""

    answer: asyncio.Future[Sequence[LeaseGrant]]
    requests: Sequence[LeaseRequest]
    since_s: float


class _Waiter(NamedTuple):
    costs: Mapping[LimitKey, int]
    answer: asyncio.Future[None]


class RateLimiter:
    """One per ingress, on its event loop. `clock` gives monotonic seconds; `holder` is this ingress's id."""

    def __init__(self, lease: LeaseCall, holder: str, clock: Callable[[], float]) -> None:
        self._lease_call = lease
        self._holder = holder
        self._clock = clock
        self._leases: dict[LimitKey, _Lease] = {}
        self._waiters: list[_Waiter] = []
        self._refilling: asyncio.Task[None] | None = None
        self._late: _LateCall | None = None
        self._one_at_a_time = asyncio.Lock()
        self._tasks = Tasks()
        self.rejected: Counter[RejectedRequest] = Counter()

    async def reserve(
        self, tenant: Tenant, costs: Mapping[LimitKey, int], reserved: Reservation | None = None
    ) -> Reservation:
        """Reserve units, waiting for the lessor if need be. Raises LimitError, but never for an unenforced limit.

        `reserved` is a part of `costs` that the request holds already: the result takes it over. If this raises, the
        caller keeps it. A request that was rejected for that part already is not counted again.
        """
        if reserved is not None and reserved.is_over_limit:
            return reserved
        held = reserved.units if reserved is not None and not reserved.is_settled else {}
        if not costs and not held:
            return Reservation({}, is_settled=True)
        try:
            for key, amount in costs.items():
                limit = limit_of(tenant.limits, key) or 0
                self._lease_of(key).limit = limit
                if amount > limit:
                    raise refusal(key, amount, limit, math.inf)
            missing = _without(costs, held)
            if missing and not self._take(missing):
                await self._wait(missing)
        except LimitError as error:
            self.rejected[RejectedRequest(error.kind, tenant.enforce)] += 1
            if tenant.enforce:
                raise
            if reserved is not None:
                self.settle(reserved, {})
            return Reservation({}, is_settled=True, is_over_limit=True)
        if reserved is not None:
            reserved.is_settled = True
        return Reservation({**held, **costs})

    def settle(self, reservation: Reservation, actual: Mapping[LimitKey, int]) -> None:
        """Settle a request that ended, once, with its actual cost; limits missing in `actual` cost all that was
        reserved.
        """
        if reservation.is_settled:
            return
        reservation.is_settled = True
        now_s = self._clock()
        for key, reserved in reservation.units.items():
            lease = self._lease_of(key)
            used = 0 if key.kind == "concurrent" else min(reserved, actual.get(key, reserved))
            lease.reserved -= reserved
            lease.used += used if key.kind == "spend" else 0
            if reserved > used:
                lease.units += reserved - used
                lease.taken_s = now_s

    def allowance(self, key: LimitKey) -> Allowance | None:
        """What this process knows of a rate limit now; None before the first answer of the lessor."""
        lease = self._leases.get(key)
        if lease is None or not lease.limit or key.kind not in PERIOD_S or lease.answered_s == -math.inf:
            return None
        refilled = (self._clock() - lease.answered_s) * lease.limit / PERIOD_S[key.kind]
        remaining = max(0, min(lease.limit, int(lease.remaining + lease.units + refilled)))
        return Allowance(lease.limit, remaining, (lease.limit - remaining) * PERIOD_S[key.kind] / lease.limit)

    async def report_loop(self) -> None:
        """Return idle units and report totals until cancelled."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self.report()

    async def report(self) -> None:
        """Report once. What the lessor misses is reported the next time."""
        if self._leases:
            await self._exchange([])

    async def close(self) -> None:
        await self._tasks.close()
        if self._late is not None:
            self._late.answer.cancel()

    def _lease_of(self, key: LimitKey) -> _Lease:
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = _Lease()
        return lease

    def _take(self, costs: Mapping[LimitKey, int]) -> bool:
        """Reserve all units or none."""
        leases = [(self._lease_of(key), amount) for key, amount in costs.items()]
        if any(lease.units < amount for lease, amount in leases):
            return False
        now_s = self._clock()
        for lease, amount in leases:
            lease.units -= amount
            lease.reserved += amount
            lease.taken_s = now_s
        return True

    def _return(self, costs: Mapping[LimitKey, int]) -> None:
        for key, amount in costs.items():
            lease = self._lease_of(key)
            lease.units += amount
            lease.reserved -= amount

    async def _wait(self, costs: Mapping[LimitKey, int]) -> None:
        waiter = _Waiter(costs, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        if self._refilling is None:
            self._refilling = self._tasks.start(self._refill_for_waiters())
        try:
            await waiter.answer
        except asyncio.CancelledError:
            if waiter.answer.done() and not waiter.answer.cancelled() and waiter.answer.exception() is None:
                self._return(costs)  # it was admitted while it was cancelled
            raise

    async def _refill_for_waiters(self) -> None:
        """Request units for waiting requests until none waits."""
        try:
            while self._waiters:
                waiters, self._waiters = self._waiters, []
                is_offline = not await self._exchange([waiter.costs for waiter in waiters])
                rejected = [waiter for waiter in waiters if not self._answer(waiter, is_offline=is_offline)]
                for waiter in rejected:  # units granted for them may help others: return them at once
                    for key in waiter.costs:
                        self._lease_of(key).taken_s = -math.inf
                if rejected and not self._waiters:
                    await self._exchange([], [key for waiter in rejected for key in waiter.costs])
        finally:
            self._refilling = None

    def _answer(self, waiter: _Waiter, *, is_offline: bool) -> bool:
        """Resolve a waiter. Returns whether it was admitted or cancelled."""
        if waiter.answer.done():
            return True
        short = self._shortage(waiter.costs, is_offline=is_offline)
        if short is None:
            assert self._take(waiter.costs), "there is enough of each"
            waiter.answer.set_result(None)
            return True
        key, wait_s = short
        waiter.answer.set_exception(refusal(key, waiter.costs[key], self._lease_of(key).limit, wait_s))
        return False

    def _shortage(self, costs: Mapping[LimitKey, int], *, is_offline: bool) -> tuple[LimitKey, float] | None:
        """The limit that a request has to wait longest for, and how long; None when nothing is missing."""
        short: list[tuple[LimitKey, float]] = []
        for key, amount in costs.items():
            lease = self._lease_of(key)
            missing = amount - lease.units
            if missing <= 0 or (is_offline and self._take_offline(key, lease, missing)):
                continue
            if key.kind not in PERIOD_S:
                short.append((key, math.inf if key.kind == "spend" else CONCURRENT_RETRY_S))
                continue
            wait_s = (missing - lease.remaining) * PERIOD_S[key.kind] / max(1, lease.limit)
            short.append((key, max(0.001, wait_s)))
        return max(short, key=lambda item: item[1]) if short else None

    def _take_offline(self, key: LimitKey, lease: _Lease, missing: int) -> bool:
        """Add units without the lessor: for rates from the own bucket, for counts up to a bound."""
        if key.kind in PERIOD_S:
            if lease.offline_counter is None:
                lease.offline_counter = GcraCounter(lease.limit, PERIOD_S[key.kind])
            if lease.offline_counter.remaining(self._clock()) < missing:
                return False
            lease.offline_used += lease.offline_counter.take(missing, self._clock())
        else:
            bound = lease.limit * SPEND_OVERDRAFT if key.kind == "spend" else lease.limit
            if lease.overdraft + missing > bound:
                return False
            lease.overdraft += missing
        lease.units += missing
        return True

    async def _exchange(
        self, costs: Sequence[Mapping[LimitKey, int]], keys: Collection[LimitKey] | None = None
    ) -> bool:
        """Report to the lessor and apply its grants; returns False while it is unavailable.

        Covers the limits in `costs`, else `keys`, else all: with thousands of tenants not every call is about all of
        them.
        """
        async with self._one_at_a_time:
            if not self._end_late_call():
                return False
            total: dict[LimitKey, int] = {}
            least: dict[LimitKey, int] = {}
            for each in costs:
                for key, amount in each.items():
                    total[key] = total.get(key, 0) + amount
                    least[key] = min(amount, least.get(key, amount))
            wanted_keys = dict.fromkeys(total or keys or self._leases)
            requests = [
                request
                for key in wanted_keys
                if (request := self._lease_request(key, self._lease_of(key), total.get(key, 0), least.get(key, 0)))
                is not None
            ]
            answer = asyncio.ensure_future(self._lease_call(self._holder, requests))
            try:
                # Not `asyncio.timeout`: an answer that came in time counts, however late this event loop gets to it.
                await asyncio.wait({answer}, timeout=OWNER_TIMEOUT_S)
            except asyncio.CancelledError:
                answer.cancel()
                raise
            if not answer.done():
                logger.warning(
                    "enforcing limits locally for now: the quota service has not answered for %g s", OWNER_TIMEOUT_S
                )
                self._late = _LateCall(answer, requests, self._clock())
                return False
            if not self._apply(requests, answer):
                return False
            if not total:
                self._drop_idle()
            return True

    def _end_late_call(self) -> bool:
        """Apply the answer to a call that took too long. Returns False while it has none and may get one.

        A call that is given up may be carried out all the same: what it reported is not reported again, so that no
        tenant is charged twice. Units that it was granted are refilled with time, or found missing in the next report
        of totals.
        """
        late = self._late
        if late is None:
            return True
        if late.answer.done():
            self._apply(late.requests, late.answer)
        elif self._clock() - late.since_s < LATE_ANSWER_S:
            return False
        else:
            late.answer.cancel()
            for request in late.requests:
                if request.key.kind not in PERIOD_S:
                    lease = self._lease_of(request.key)
                    lease.reported_holding = max(1, lease.reported_holding)  # so that there is a next report
        self._late = None
        return True

    def _apply(self, requests: Sequence[LeaseRequest], answer: asyncio.Future[Sequence[LeaseGrant]]) -> bool:
        """Apply the grants of a call, or take back what it reported if the lessor did not carry it out."""
        grants = _grants(answer, len(requests))
        if grants is None:
            for request in requests:
                lease = self._lease_of(request.key)
                lease.units += request.returned
                lease.offline_used += request.offline_used
            return False
        for request, grant in zip(requests, grants, strict=True):
            lease = self._lease_of(request.key)
            lease.units += grant.granted
            lease.remaining, lease.answered_s = grant.remaining, self._clock()
            lease.offline_counter, lease.overdraft = None, 0
            lease.reported_holding, lease.reported_used = request.holding + grant.granted, request.used
            if grant.granted:
                lease.taken_s = lease.answered_s
        return True

    def _drop_idle(self) -> None:
        """Drop leases that were not used for a minute and have nothing to report."""
        if self._waiters:
            return
        now_s = self._clock()
        for key, lease in list(self._leases.items()):
            is_empty = not (lease.units or lease.reserved or lease.used or lease.offline_used or lease.reported_holding)
            if is_empty and now_s - lease.taken_s > IDLE_DROP_S and now_s - lease.answered_s > IDLE_DROP_S:
                del self._leases[key]

    def _lease_request(self, key: LimitKey, lease: _Lease, cost: int, least: int) -> LeaseRequest | None:
        """What to report and request of one limit; None if there is nothing."""
        is_idle = not cost and self._clock() - lease.taken_s >= IDLE_RETURN_S
        missing = max(0, cost - lease.units)
        if key.kind in PERIOD_S:
            returned, offline_used = lease.units if is_idle else 0, lease.offline_used
            if not (missing or returned or offline_used):
                return None
            lease.units -= returned
            lease.offline_used = 0
            return LeaseRequest(key, missing, max(0, least - lease.units), returned, offline_used)
        if not cost and (is_idle or key.kind == "concurrent"):
            lease.units = 0  # totals are reported: units that are not held are returned by that
        holding = lease.units + lease.reserved
        if not (missing or holding or lease.reported_holding or lease.used != lease.reported_used):
            return None
        return LeaseRequest(key, missing, max(0, least - lease.units), holding=holding, used=lease.used)


def _grants(answer: asyncio.Future[Sequence[LeaseGrant]], num_requests: int) -> Sequence[LeaseGrant] | None:
    """One grant per request; None if the lessor was unavailable or answered something unexpected."""
    try:
        grants = answer.result()
        if len(grants) == num_requests:
            return grants
        logger.error(
            "enforcing limits locally for now: the quota service sent %d grants for %d requests",
            len(grants),
            num_requests,
        )
    except NotReady as error:
        logger.warning("enforcing limits locally for now: %s", error)
    except Exception:  # a service of another version may raise anything, and requests wait
        logger.exception("enforcing limits locally for now")
    return None


def _without(costs: Mapping[LimitKey, int], reserved: Mapping[LimitKey, int]) -> dict[LimitKey, int]:
    return {key: amount - reserved.get(key, 0) for key, amount in costs.items() if amount > reserved.get(key, 0)}
