"""The owner's side of limits: every ingress takes from it what it admits requests with.

In: what ingresses need, give back and have used. Out: what each gets. Units are lent in small lots, somewhat more than
are needed now while much is left and exactly as many when little is, so that few requests wait for an answer and none
is refused while another ingress sits on units. Rule: what all ingresses hold and have used is never above a limit.
The counts are in memory; `QuotaService` reads the ledger for money. Each service has one owner and enforces limits by
itself, also where several services use one database.
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

#: Of what is left after a need is met, this part is lent ahead.
AHEAD = 1 / 64
#: An ingress that has not been heard of for this long is gone: what it held of counts is free.
HOLDER_SILENCE_S = 15.0
#: After an ingress was lost, the ledger is read again when the time since then has grown by this part.
RECONCILE_PART = 1 / 8


@message
class LeaseRequest(NamedTuple):
    """What an ingress says of one meter.

    `need`: units for all requests that wait; with fewer than `least` none of them is helped. Of rates: `returned` units
    are not needed, `unasked` were used while nobody could be asked. Of counts: what it holds, and has used up since it
    began.
    """

    meter: LimitKey
    need: int = 0
    least: int = 0
    returned: int = 0
    unasked: int = 0
    holding: int = 0
    used: int = 0


@message
class LeaseGrant(NamedTuple):
    """`remaining` is what is left after it."""

    granted: int
    remaining: int


class QuotaService:
    """A `QuotaLessor` that knows from the ledger what tenants have spent. One event loop; the ledger is called in threads.

    Every method raises NotReady while the ledger does not answer.
    """

    def __init__(self, tenant: Callable[[str], Tenant | None], ledger: Ledger) -> None:
        self._lender = QuotaLessor(tenant, lambda tenant_id, month: self._spent[month][tenant_id])
        self._ledger = ledger
        self._spent: dict[str, dict[str, int]] = {}  # month -> tenant -> nanos in the ledger when it was first read
        self._reconciled_s = 0.0

    async def lend(self, holder: str, wants: Sequence[LeaseRequest], now_s: float) -> list[LeaseGrant]:
        await self._read_spent([want.meter for want in wants], now_s)
        return self._lender.lend(holder, wants, now_s)

    async def left(self, tenant_id: str, now_s: float) -> list[tuple[LimitKey, int, int]]:
        await self._read_spent(self._lender.meters(tenant_id), now_s)
        return self._lender.left(tenant_id, now_s)

    def remaining_spend(self, tenant_id: str) -> int | None:
        return self._lender.remaining_spend(tenant_id)

    async def reconcile(self, now_s: float) -> None:
        """Read from the ledger what lost ingresses had spent without reporting it; call this every few seconds.

        Replicas write later what they still compute for a lost ingress, so the ledger is read again until the month
        ends, at growing intervals.
        """
        lost_s = self._lender.buried_s
        if not lost_s or now_s - self._reconciled_s < (self._reconciled_s - lost_s) * RECONCILE_PART:
            return
        if tenant_ids := self._lender.left_behind():
            self._lender.reckon(await asyncio.to_thread(self._ledger.spent_by, tenant_ids, now_s), now_s)
        self._reconciled_s = now_s

    async def _read_spent(self, meters: Sequence[LimitKey], now_s: float) -> None:
        month = month_of(now_s)
        if month not in self._spent:  # keep the month before: calls that began in it may not have ended
            self._spent = {each: self._spent[each] for each in sorted(self._spent)[-1:]} | {month: {}}
        spent = self._spent[month]
        for tenant_id in (meter.tenant_id for meter in meters if meter.kind == "spend"):
            if tenant_id not in spent:
                spent[tenant_id] = await asyncio.to_thread(self._ledger.spent, tenant_id, now_s)


class QuotaLessor:
    """One event loop. `spent` tells what a tenant has spent in a month so far, in nanos, as the ledger has it."""

    def __init__(self, tenant: Callable[[str], Tenant | None], spent: Callable[[str, str], int]) -> None:
        self._tenant = tenant
        self._spent = spent
        self._counters: dict[LimitKey, Counter] = {}
        self._heard_s: dict[str, float] = {}
        self._month = ""
        self.buried_s = 0.0  # when an ingress was found to be gone

    def lend(self, holder: str, wants: Sequence[LeaseRequest], now_s: float) -> list[LeaseGrant]:
        """Take what comes back, then give what is needed, meter by meter. An empty list of wants says: still here."""
        self._bury(now_s)
        self._heard_s[holder] = now_s
        self._turn_month(now_s)
        return [
            LeaseGrant(want.need, 0)
            if (limit := self._limit(want.meter)) is None
            else _lend(self._counter(want.meter, limit), holder, want, limit, now_s)
            for want in wants
        ]

    def left(self, tenant_id: str, now_s: float) -> list[tuple[LimitKey, int, int]]:
        """Each limit of a tenant, and how much of it is neither used nor lent to an ingress."""
        meters = self.meters(tenant_id)
        grants = self.lend("", [LeaseRequest(meter) for meter in meters], now_s)
        return [(meter, self._limit(meter) or 0, grant.remaining) for meter, grant in zip(meters, grants, strict=True)]

    def remaining_spend(self, tenant_id: str) -> int | None:
        """Nanos that a tenant has left this month, as far as anybody has asked."""
        counter = self._counters.get(LimitKey(tenant_id, "spend"))
        return counter.remaining() if isinstance(counter, BudgetCounter) else None

    def meters(self, tenant_id: str) -> list[LimitKey]:
        """All that a tenant has limits of."""
        tenant = self._tenant(tenant_id)
        return [] if tenant is None else limit_keys(tenant)

    def left_behind(self) -> list[str]:
        """Tenants of whose money ingresses that are gone held some."""
        counters = self._counters.items()
        return [meter.tenant_id for meter, each in counters if isinstance(each, BudgetCounter) and each.left]

    def reckon(self, in_ledger: Mapping[str, int], now_s: float) -> None:
        """So much has each tenant spent in the month of that time, as the ledger has it."""
        if month_of(now_s) != self._month:
            return
        for tenant_id, spent in in_ledger.items():
            counter = self._counters.get(LimitKey(tenant_id, "spend"))
            if isinstance(counter, BudgetCounter):
                counter.reckon(spent)

    def _limit(self, meter: LimitKey) -> int | None:
        tenant = self._tenant(meter.tenant_id)
        return None if tenant is None else limit_of(tenant.limits, meter)

    def _bury(self, now_s: float) -> None:
        """Ingresses that have not been heard of for too long hold nothing any more.

        Money that they may have spent without a word is not free before the ledger has been asked (`reckon`).
        """
        gone = [holder for holder, heard_s in self._heard_s.items() if now_s - heard_s > HOLDER_SILENCE_S]
        for holder in gone:
            del self._heard_s[holder]
        if gone:
            self.buried_s = now_s
            for counter in self._counters.values():
                if isinstance(counter, BudgetCounter):
                    counter.forget(gone)

    def _turn_month(self, now_s: float) -> None:
        if self._month != (month := month_of(now_s)):
            self._month = month
            self._counters = {meter: each for meter, each in self._counters.items() if meter.kind != "spend"}

    def _counter(self, meter: LimitKey, limit: int) -> Counter:
        counter = self._counters.get(meter)
        if counter is None:
            counter = self._counters[meter] = self._new_counter(meter, limit)
        return counter

    def _new_counter(self, meter: LimitKey, limit: int) -> Counter:
        period_s = PERIOD_S.get(meter.kind)
        if period_s is not None:
            return GcraCounter(limit, period_s)
        if meter.kind == "spend":
            return BudgetCounter(limit, self._spent(meter.tenant_id, self._month), is_spent=True)
        return BudgetCounter(limit, is_spent=False)


def _lend(counter: Counter, holder: str, want: LeaseRequest, limit: int, now_s: float) -> LeaseGrant:
    """Take what comes back to one meter, then give what is needed."""
    if isinstance(counter, GcraCounter):
        return _lend_rate(counter, want, limit, now_s)
    counter.limit = limit
    counter.report(holder, want.holding, want.used)
    granted = 0
    if want.need and counter.remaining() >= want.least:
        # Concurrent requests are few: none is lent ahead, or it would be missed elsewhere.
        ahead = int((counter.remaining() - want.need) * AHEAD) if want.meter.kind == "spend" else 0
        granted = counter.take(holder, want.need + max(0, ahead))
    return LeaseGrant(granted, counter.remaining())


def _lend_rate(counter: GcraCounter, want: LeaseRequest, limit: int, now_s: float) -> LeaseGrant:
    counter.set_limit(limit, now_s)
    counter.give_back(want.returned, now_s)
    counter.charge(want.unasked, now_s)
    granted = 0
    if want.need and counter.remaining(now_s) >= want.least:
        ahead = int((counter.remaining(now_s) - want.need) * AHEAD)
        granted = counter.take(want.need + max(0, ahead), now_s)
    return LeaseGrant(granted, counter.remaining(now_s))
