"""Limits as quantities: what a request costs of which limit, and the counters.

A rate is a GCRA (ITU-T I.371): one number, the theoretical arrival time, bounds both the burst and the long run. Units
are taken before a request is admitted; nothing is checked now and counted later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from app.deployments.tenancy.models import Tenant, TenantLimits
from app.engine.errors import PolyloraError
from app.engine.wire_format import message

LimitKind = Literal["requests", "tokens", "day", "calls", "concurrent", "spend", "adapters"]

#: The period of each rate limit, in seconds.
PERIOD_S: Mapping[LimitKind, float] = {"requests": 60.0, "tokens": 60.0, "day": 86_400.0, "calls": 60.0}
#: Names in error messages.
_NAMES: Mapping[LimitKind, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "day": "requests per day",
    "calls": "calls per minute",
    "concurrent": "concurrent sequences",
    "spend": "spend of this month",
    "adapters": "adapters",
}
#: Spend is counted in billionths of a dollar, so a token's price is a whole number.
NANOS_PER_CENT = 10_000_000
#: When concurrent sequences end is unknown: suggest a retry after this long.
CONCURRENT_RETRY_S = 0.5


@message
class LimitKey(NamedTuple):
    """One limit of one tenant. `model` is empty for limits that cover all models."""

    tenant_id: str
    kind: LimitKind
    model: str = ""


class Cost(NamedTuple):
    """What one sequence costs: the tokens of its prompt and all that it may generate.

    `models`: its adapter and the parts of that, or the base model alone.
    """

    models: tuple[str, ...]
    num_tokens: int
    cost_nanos: int


class LimitError(PolyloraError):
    """A tenant's limit is exhausted. `retry_after_s` None: waiting does not help."""

    def __init__(self, message: str, kind: LimitKind, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.kind, self.retry_after_s))


class AdapterQuotaError(LimitError):
    """A project has its maximum number or bytes of adapters."""


class SpendLimitError(LimitError):
    """The monthly spend limit is exhausted."""


def limit_of(limits: TenantLimits, key: LimitKey) -> int | None:
    """The limit of a key; None if there is none (any more)."""
    if key.kind == "concurrent":
        return limits.max_concurrent
    if key.kind == "calls":
        return limits.calls_per_min
    if key.kind == "spend":
        return None if limits.spend_cents is None else limits.spend_cents * NANOS_PER_CENT
    rate = limits.rates.get(key.model)
    if rate is None:
        return None
    return {"requests": rate.requests_per_min, "tokens": rate.tokens_per_min, "day": rate.requests_per_day}[key.kind]


def limit_keys(tenant: Tenant) -> list[LimitKey]:
    """All limits of a tenant."""
    kinds: tuple[LimitKind, ...] = ("requests", "tokens", "day")
    rates = [LimitKey(tenant.id, kind, model) for model in sorted(tenant.limits.rates) for kind in kinds]
    of_project: tuple[LimitKind, ...] = ("calls", "concurrent", "spend")
    all_ = [*rates, *(LimitKey(tenant.id, kind) for kind in of_project)]
    return [key for key in all_ if limit_of(tenant.limits, key) is not None]


def request_costs(tenant: Tenant, base_name: str, costs: Sequence[Cost]) -> dict[LimitKey, int]:
    """What a request costs of each of its tenant's limits; empty without limits.

    It counts as one request of the base model, whose limits cover everything, and as one of each adapter that it uses,
    alone or in a combination. Each of its sequences (`n`, or texts to embed) counts as concurrent.
    """
    limits = tenant.limits
    taken: dict[LimitKey, int] = {}
    if limits.rates:
        for model in {base_name, *(model for cost in costs for model in cost.models)} & limits.rates.keys():
            tokens = sum(cost.num_tokens for cost in costs if model == base_name or model in cost.models)
            amounts: tuple[tuple[LimitKind, int], ...] = (("requests", 1), ("tokens", tokens), ("day", 1))
            taken |= {LimitKey(tenant.id, kind, model): amount for kind, amount in amounts}
    taken[LimitKey(tenant.id, "concurrent")] = max(1, len(costs))
    taken[LimitKey(tenant.id, "spend")] = sum(cost.cost_nanos for cost in costs)
    return {key: amount for key, amount in taken.items() if limit_of(limits, key) is not None}


def refusal(key: LimitKey, amount: int, limit: int, wait_s: float) -> LimitError:
    """The error for a refused request, with the value, the limit and the way out."""
    of = f" of model {key.model!r}" if key.model else ""
    if key.kind == "spend":
        return SpendLimitError(
            f"the project's {_NAMES['spend']} has reached its limit of {limit / NANOS_PER_CENT / 100:.2f} USD; raise "
            "the limit or wait for the next month",
            key.kind,
            None,
        )
    if amount > limit:
        way_out = "lower n or send fewer texts" if key.kind == "concurrent" else "shorten the prompt, lower max_tokens"
        return LimitError(
            f"the request needs {amount} of the project's {_NAMES[key.kind]}{of}, and the limit is {limit}; {way_out}, "
            "or raise the limit",
            key.kind,
            None,
        )
    return LimitError(
        f"the project's {_NAMES[key.kind]}{of} have reached their limit of {limit}; try again in {wait_s:.3g} s",
        key.kind,
        wait_s,
    )


class GcraCounter:
    """A GCRA: `limit` units per `period_s`, refilled evenly, all of them at once after idle time."""

    def __init__(self, limit: int, period_s: float) -> None:
        self.limit = limit
        self._period_s = period_s
        self.paid_s = -math.inf  # the theoretical arrival time: when all taken units are refilled

    def remaining(self, now_s: float) -> int:
        """Units that may be taken now."""
        return max(0, math.floor(self.limit - self.outstanding(now_s) + 1e-6))

    def take(self, amount: int, now_s: float) -> int:
        """Take up to `amount`; returns how much was taken."""
        amount = min(amount, self.remaining(now_s))
        self.charge(amount, now_s)
        return amount

    def refund(self, amount: int, now_s: float) -> None:
        """Return units that were taken and not needed."""
        self._set_outstanding(max(0.0, self.outstanding(now_s) - amount), now_s)

    def charge(self, amount: int, now_s: float) -> None:
        """Count used units, whether or not they were available."""
        self._set_outstanding(self.outstanding(now_s) + amount, now_s)

    def set_limit(self, limit: int, now_s: float) -> None:
        """Change the limit; used units stay used, up to the new limit."""
        if limit != self.limit:
            outstanding = self.outstanding(now_s)
            self.limit = limit
            self._set_outstanding(min(outstanding, float(limit)), now_s)

    def outstanding(self, now_s: float) -> float:
        """Units that are not refilled yet."""
        return max(0.0, self.paid_s - now_s) * self.limit / self._period_s

    def _set_outstanding(self, units: float, now_s: float) -> None:
        self.paid_s = now_s + (units * self._period_s / self.limit if self.limit else 0.0)


class BudgetCounter:
    """At most `limit` units in all: what is used up, and what holders have leased and may return.

    Holders report totals, not changes, so a report that is repeated or lost does no lasting harm. `used_by` is each
    holder's last total; it is kept after a holder expired, because it may report again. Without `is_spent` nothing is
    used up and it stays empty.

    A holder's use before its first report may be in the ledger only later than `used` was read from there: it is
    `unreconciled`, too, by another name. An expired holder may have used up its lease unreported (`unreconciled`).
    `presumed_used` counts for both: the whole lease until `reconcile`, then what the ledger has beyond `used`. It is
    recomputed each time and never added to `used`, so use that the ledger knows before its holder reports it is not
    counted twice.
    """

    def __init__(self, limit: int, used: int = 0, *, is_spent: bool) -> None:
        self.limit = limit
        self.used = used
        self.is_spent = is_spent
        self.leased: dict[str, int] = {}
        self.used_by: dict[str, int] = {}
        self.unreconciled: dict[str, int] = {}
        self.presumed_used = 0

    def remaining(self) -> int:
        """Units that may be taken now."""
        return max(0, self.limit - self.used - self.presumed_used - sum(self.leased.values()))

    def report(self, holder: str, holding: int, used: int) -> None:
        """Record a holder's totals: `holding` now, `used` since it started (at its first report: unknown, so a
        baseline).
        """
        if self.is_spent:
            if holder not in self.used_by and used:
                self.unreconciled[f"{holder} before its first report"] = used
            self.used += used - self.used_by.get(holder, used)
            self.used_by[holder] = used
        if self.unreconciled.pop(holder, 0):
            self.presumed_used = min(self.presumed_used, sum(self.unreconciled.values()))
        self.leased[holder] = holding

    def take(self, holder: str, amount: int) -> int:
        """Lease up to `amount`; returns how much was leased."""
        amount = min(amount, self.remaining())
        self.leased[holder] = self.leased.get(holder, 0) + amount
        return amount

    def expire(self, holders: Iterable[str]) -> None:
        """Free the leases of holders that are gone, unless they may be used up. Later reports of theirs still count."""
        for holder in holders:
            units = self.leased.pop(holder, 0)
            if self.is_spent and units:
                self.unreconciled[holder] = units
                self.presumed_used += units

    def reconcile(self, in_ledger: int) -> None:
        """Apply the total use in the ledger."""
        self.presumed_used = min(max(0, in_ledger - self.used), sum(self.unreconciled.values()))


def monotonic_unix_clock(clock: Callable[[], float], monotonic: Callable[[], float]) -> Callable[[], float]:
    """Unix time at this call plus the seconds passed since, unaffected by changes of the system clock.

    A rate measured by a settable clock would refuse everything after it is set back, and grant everything after it is
    set forward.
    """
    began_s, passed_s = clock(), monotonic()
    return lambda: began_s + (monotonic() - passed_s)


def month_of(now_s: float) -> str:
    """The calendar month (UTC) that spend is counted in."""
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m")


def month_start_s(now_s: float) -> float:
    """Unix time when that month began."""
    moment = datetime.fromtimestamp(now_s, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
