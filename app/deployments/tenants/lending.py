"""The owner's side of limits: every ingress takes from it what it admits requests with.

In: what ingresses need, give back and have used. Out: what each gets. Units are lent in small lots, somewhat more than
are needed now while much is left and exactly as many when little is, so that few requests wait for an answer and none
is refused while another ingress sits on units. Rule: what all ingresses hold and have used is never above a limit.
Where several processes own the limits of one database (services with a registry process each), each lends its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.deployments.tenants.entries import Tenant
from app.deployments.tenants.limits import PERIOD_S, CountCounter, Meter, RateCounter, limit_of, meters_of, month_of
from app.engine.message import message

#: Of what is left after a need is met, this part is lent ahead.
AHEAD = 1 / 64
#: An ingress that has not been heard of for this long is gone: what it held of counts is free.
HOLDER_SILENCE_S = 15.0


@message
class Want(NamedTuple):
    """What an ingress says of one meter.

    `need`: units for all requests that wait; with fewer than `least` none of them is helped. Of rates: `returned` units
    are not needed, `unasked` were used while nobody could be asked. Of counts: what it holds, and has used up since it
    began.
    """

    meter: Meter
    need: int = 0
    least: int = 0
    returned: int = 0
    unasked: int = 0
    holding: int = 0
    used: int = 0


@message
class Grant(NamedTuple):
    """`remaining` is what is left after it."""

    granted: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many owners of the same limits this one is, from 0."""

    index: int = 0
    count: int = 1

    def part(self, limit: int) -> int:
        """This owner's part of a limit: all parts together are the limit."""
        return (limit + self.index) // self.count


class Lender:
    """One event loop. `spent` tells what a tenant has spent in a month so far, in nanos, as the ledger has it."""

    def __init__(self, tenant: Callable[[str], Tenant | None], spent: Callable[[str, str], int]) -> None:
        self._tenant = tenant
        self._spent = spent
        self._rates: dict[Meter, RateCounter] = {}
        self._counts: dict[Meter, CountCounter] = {}
        self._heard_s: dict[str, float] = {}
        self._month = ""
        self.place = Place()

    def lend(self, holder: str, wants: Sequence[Want], now_s: float) -> list[Grant]:
        """Take what comes back, then give what is needed, meter by meter. An empty list of wants says: still here."""
        self._bury(now_s)
        self._heard_s[holder] = now_s
        if self._month != (month := month_of(now_s)):
            self._month = month
            self._counts = {meter: each for meter, each in self._counts.items() if meter.kind != "spend"}
        return [self._one(holder, want, now_s) for want in wants]

    def left(self, tenant_id: str, now_s: float) -> list[tuple[Meter, int, int]]:
        """Each limit of a tenant, and how much of it is neither used nor lent to an ingress."""
        tenant = self._tenant(tenant_id)
        if tenant is None:
            return []
        grants = self.lend("", [Want(meter) for meter in meters_of(tenant)], now_s)
        limits = [limit_of(tenant.limits, meter) or 0 for meter in meters_of(tenant)]
        return [
            (meter, limit, grant.remaining)
            for meter, limit, grant in zip(meters_of(tenant), limits, grants, strict=True)
        ]

    def remaining_spend(self, tenant_id: str) -> int | None:
        """Nanos that a tenant has left this month, as far as anybody has asked."""
        counter = self._counts.get(Meter(tenant_id, "spend"))
        return None if counter is None else counter.remaining()

    def _one(self, holder: str, want: Want, now_s: float) -> Grant:
        tenant = self._tenant(want.meter.tenant_id)
        limit = None if tenant is None else limit_of(tenant.limits, want.meter)
        if limit is None:
            return Grant(want.need, 0)
        if want.meter.kind in PERIOD_S:
            return self._rate(want, self.place.part(limit), now_s)
        return self._count(holder, want, limit)

    def _rate(self, want: Want, limit: int, now_s: float) -> Grant:
        counter = self._rates.get(want.meter)
        if counter is None:
            counter = self._rates[want.meter] = RateCounter(limit, PERIOD_S[want.meter.kind])
        counter.set_limit(limit, now_s)
        counter.give_back(want.returned, now_s)
        counter.charge(want.unasked, now_s)
        granted = 0
        if want.need and counter.remaining(now_s) >= want.least:
            ahead = int((counter.remaining(now_s) - want.need) * AHEAD)
            granted = counter.take(want.need + max(0, ahead), now_s)
        return Grant(granted, counter.remaining(now_s))

    def _count(self, holder: str, want: Want, limit: int) -> Grant:
        counter = self._counts.get(want.meter)
        if counter is None:
            used = self._spent(want.meter.tenant_id, self._month) if want.meter.kind == "spend" else 0
            counter = self._counts[want.meter] = CountCounter(limit, used)
        spent_before = counter.spent_before if want.meter.kind == "spend" else 0
        counter.limit = spent_before + self.place.part(max(0, limit - spent_before))
        counter.report(holder, want.holding, want.used)
        granted = 0
        if want.need and counter.remaining() >= want.least:
            # Concurrent requests are few: none is lent ahead, or it would be missed elsewhere.
            ahead = int((counter.remaining() - want.need) * AHEAD) if want.meter.kind == "spend" else 0
            granted = counter.take(holder, want.need + max(0, ahead))
        return Grant(granted, counter.remaining())

    def _bury(self, now_s: float) -> None:
        gone = [holder for holder, heard_s in self._heard_s.items() if now_s - heard_s > HOLDER_SILENCE_S]
        for holder in gone:
            del self._heard_s[holder]
        if gone:
            for counter in self._counts.values():
                counter.forget(gone)
