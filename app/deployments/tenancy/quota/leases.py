"""Quota leases: the central count of every limit, and the units that it lends to ingresses.

Ingresses admit requests with leased units and return what they do not need. Leases are small and a little ahead of the
need while much remains, exact when little does, so that few requests wait and none is refused while another ingress
holds idle units. What is leased and used together never exceeds a limit. Counts are in memory; `QuotaService` reads
spend from the ledger. Each service enforces limits by itself, also where several services share one database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.deployments.tenancy.models import Tenant
from app.deployments.tenancy.quota.limits import (
    PERIOD_S,
    BudgetCounter,
    GcraCounter,
    LimitKey,
    limit_keys,
    limit_of,
    month_of,
)
from app.engine.wire_format import message

if TYPE_CHECKING:  # a database: a process that only calls the owner starts without
    from app.deployments.tenancy.usage.ledger import Ledger

Counter = GcraCounter | BudgetCounter

#: Fraction of what remains after a request that is leased ahead.
LEASE_AHEAD = 1 / 64
#: An ingress without a heartbeat for this long is expired and its leased counts are freed.
HOLDER_TIMEOUT_S = 15.0
#: After an ingress came or expired, the ledger is read again when the time since then has grown by this fraction.
RECONCILE_PART = 1 / 8


@message
class LeaseRequest(NamedTuple):
    """What an ingress reports and needs of one limit.

    `need`: units for all waiting requests; fewer than `least` help none of them. For rates: `returned` units are not
    needed, `offline_used` were used while the lessor was unavailable. For counts: the totals that it holds and has used
    up since it started.
    """

    key: LimitKey
    need: int = 0
    least: int = 0
    returned: int = 0
    offline_used: int = 0
    holding: int = 0
    used: int = 0


@message
class LeaseGrant(NamedTuple):
    """The granted units, and what `remaining` there is after them."""

    granted: int
    remaining: int


class QuotaService:
    """A `QuotaLessor` with the tenants' spend from the ledger. One event loop; the ledger is called in threads.

    Every method raises NotReady while the ledger is unavailable.
    """

    def __init__(self, tenant: Callable[[str], Tenant | None], ledger: Ledger) -> None:
        self._lessor = QuotaLessor(tenant, lambda tenant_id, month: self._spent[month][tenant_id])
        self._ledger = ledger
        self._spent: dict[str, dict[str, int]] = {}  # month -> tenant -> nanos when first read
        self._reading = asyncio.Lock()
        self._reconciled_s = 0.0

    async def lease(self, holder: str, requests: Sequence[LeaseRequest], now_s: float) -> list[LeaseGrant]:
        await self._read_spent([request.key for request in requests], now_s)
        return self._lessor.lease(holder, requests, now_s)

    async def remaining(self, tenant_id: str, now_s: float) -> list[tuple[LimitKey, int, int]]:
        await self._read_spent(self._lessor.keys(tenant_id), now_s)
        return self._lessor.remaining(tenant_id, now_s)

    def remaining_spend(self, tenant_id: str) -> int | None:
        return self._lessor.remaining_spend(tenant_id)

    def forget_spend(self, tenant_id: str) -> None:
        """Read a tenant's spend from the ledger again: without an enforced limit it was not counted."""
        self._lessor.forget_spend(tenant_id)
        for spent in self._spent.values():
            spent.pop(tenant_id, None)

    async def reconcile(self, now_s: float) -> None:
        """Read from the ledger what expired ingresses had spent without reporting it, and what others had spent before
        their first report to this process; call this every few seconds.

        Replicas record later what they still compute for a lost ingress, and what they could not record while there was
        no adapter store, so the ledger is read again until the month ends, at growing intervals.
        """
        since_s = self._lessor.holders_changed_s
        if not since_s or now_s - self._reconciled_s < (self._reconciled_s - since_s) * RECONCILE_PART:
            return
        if tenant_ids := self._lessor.tenants_to_reconcile():
            self._lessor.reconcile(await asyncio.to_thread(self._ledger.spend_by_project, tenant_ids, now_s), now_s)
        self._reconciled_s = now_s

    async def _read_spent(self, keys: Sequence[LimitKey], now_s: float) -> None:
        month = month_of(now_s)
        if month not in self._spent:  # keep the last month: calls of it may still be running
            self._spent = {each: self._spent[each] for each in sorted(self._spent)[-1:]} | {month: {}}
        spent, tenant_ids = self._spent[month], {key.tenant_id for key in keys if key.kind == "spend"}
        while tenant_ids - spent.keys():
            async with self._reading:  # callers that waited find it read
                for tenant_id in tenant_ids - spent.keys():
                    spent[tenant_id] = await asyncio.to_thread(self._ledger.project_spend, tenant_id, now_s)


class QuotaLessor:
    """The counters of all limits. One event loop. `spent` gives a tenant's spend of a month in nanos."""

    def __init__(self, tenant: Callable[[str], Tenant | None], spent: Callable[[str, str], int]) -> None:
        self._tenant = tenant
        self._spent = spent
        self._counters: dict[LimitKey, Counter] = {}
        self._heartbeats_s: dict[str, float] = {}
        self._month = ""
        self.holders_changed_s = 0.0  # when an ingress last came or expired

    def lease(self, holder: str, requests: Sequence[LeaseRequest], now_s: float) -> list[LeaseGrant]:
        """Take back returned units, then grant each request. An empty list is a heartbeat."""
        self._expire_holders(now_s)
        if holder and holder not in self._heartbeats_s:
            self.holders_changed_s = now_s
        self._heartbeats_s[holder] = now_s
        self._start_month(now_s)
        return [
            LeaseGrant(request.need, 0)
            if (limit := self._limit(request.key)) is None
            else _lease(self._counter(request.key, limit), holder, request, limit, now_s)
            for request in requests
        ]

    def remaining(self, tenant_id: str, now_s: float) -> list[tuple[LimitKey, int, int]]:
        """Each limit of a tenant, and how much of it is neither used nor leased."""
        keys = self.keys(tenant_id)
        grants = self.lease("", [LeaseRequest(key) for key in keys], now_s)
        return [(key, self._limit(key) or 0, grant.remaining) for key, grant in zip(keys, grants, strict=True)]

    def remaining_spend(self, tenant_id: str) -> int | None:
        """Nanos that a tenant may still spend this month; None if no ingress has asked yet."""
        counter = self._counters.get(LimitKey(tenant_id, "spend"))
        return counter.remaining() if isinstance(counter, BudgetCounter) else None

    def forget_spend(self, tenant_id: str) -> None:
        """Begin a tenant's count of spend again, at the next lease."""
        self._counters.pop(LimitKey(tenant_id, "spend"), None)

    def keys(self, tenant_id: str) -> list[LimitKey]:
        """All limits of a tenant."""
        tenant = self._tenant(tenant_id)
        return [] if tenant is None else limit_keys(tenant)

    def tenants_to_reconcile(self) -> list[str]:
        """Tenants whose spend may be in the ledger without having been reported."""
        counters = self._counters.items()
        return [key.tenant_id for key, each in counters if isinstance(each, BudgetCounter) and each.unreconciled]

    def reconcile(self, in_ledger: Mapping[str, int], now_s: float) -> None:
        """Apply the spend in the ledger, by tenant, in the month of `now_s`."""
        if month_of(now_s) != self._month:
            return
        for tenant_id, spent in in_ledger.items():
            counter = self._counters.get(LimitKey(tenant_id, "spend"))
            if isinstance(counter, BudgetCounter):
                counter.reconcile(spent)

    def _limit(self, key: LimitKey) -> int | None:
        tenant = self._tenant(key.tenant_id)
        return None if tenant is None else limit_of(tenant.limits, key)

    def _expire_holders(self, now_s: float) -> None:
        """Drop the leases of ingresses without a heartbeat.

        Spend that they may have used up unreported stays counted until the ledger is read (`reconcile`).
        """
        expired = [
            holder for holder, heartbeat_s in self._heartbeats_s.items() if now_s - heartbeat_s > HOLDER_TIMEOUT_S
        ]
        for holder in expired:
            del self._heartbeats_s[holder]
        if expired:
            self.holders_changed_s = now_s
            for counter in self._counters.values():
                if isinstance(counter, BudgetCounter):
                    counter.expire(expired)

    def _start_month(self, now_s: float) -> None:
        if self._month != (month := month_of(now_s)):
            self._month = month
            self._counters = {key: each for key, each in self._counters.items() if key.kind != "spend"}

    def _counter(self, key: LimitKey, limit: int) -> Counter:
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._new_counter(key, limit)
        return counter

    def _new_counter(self, key: LimitKey, limit: int) -> Counter:
        period_s = PERIOD_S.get(key.kind)
        if period_s is not None:
            return GcraCounter(limit, period_s)
        if key.kind == "spend":
            return BudgetCounter(limit, self._spent(key.tenant_id, self._month), is_spent=True)
        return BudgetCounter(limit, is_spent=False)


def _lease(counter: Counter, holder: str, request: LeaseRequest, limit: int, now_s: float) -> LeaseGrant:
    """Take back what one request returns, then grant it."""
    if isinstance(counter, GcraCounter):
        return _lease_rate(counter, request, limit, now_s)
    counter.limit = limit
    counter.report(holder, request.holding, request.used)
    granted = 0
    if request.need and counter.remaining() >= request.least:
        # Concurrent requests are few: none is leased ahead, or it would be missing elsewhere.
        ahead = int((counter.remaining() - request.need) * LEASE_AHEAD) if request.key.kind == "spend" else 0
        granted = counter.take(holder, request.need + max(0, ahead))
    return LeaseGrant(granted, counter.remaining())


def _lease_rate(counter: GcraCounter, request: LeaseRequest, limit: int, now_s: float) -> LeaseGrant:
    counter.set_limit(limit, now_s)
    counter.refund(request.returned, now_s)
    counter.charge(request.offline_used, now_s)
    granted = 0
    if request.need and counter.remaining(now_s) >= request.least:
        ahead = int((counter.remaining(now_s) - request.need) * LEASE_AHEAD)
        granted = counter.take(request.need + max(0, ahead), now_s)
    return LeaseGrant(granted, counter.remaining(now_s))
