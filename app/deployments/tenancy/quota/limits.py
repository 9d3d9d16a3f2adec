"""Limits as quantities: what a request needs of which meter, and the meters themselves.

In: a tenant's limits, a clock. Out: how much may be taken now, and when more may be. A rate is a GCRA (ITU-T I.371):
one number, the time at which everything taken so far is paid for; nobody gets more than the limit at once, nor in the
long run. Rule: what is admitted was taken before; nothing is checked now and counted later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from app.deployments.tenancy.models import Tenant, TenantLimits
from app.engine.errors import PolyloraError
from app.engine.wire_format import message

MeterKind = Literal["requests", "tokens", "day", "concurrent", "spend", "adapters"]

#: What a rate's limit is counted over, in seconds.
PERIOD_S: Mapping[MeterKind, float] = {"requests": 60.0, "tokens": 60.0, "day": 86_400.0}
#: In words, for who is refused.
_WORDS: Mapping[MeterKind, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "day": "requests per day",
    "concurrent": "concurrent requests",
    "spend": "spend of this month",
    "adapters": "adapters",
}
#: Spend is counted in billionths of a dollar: a token's price is a whole number of them.
NANOS_PER_CENT = 10_000_000
#: A concurrent request ends at a time that nobody knows: try again after this long.
CONCURRENT_RETRY_S = 0.5


@message
class LimitKey(NamedTuple):
    """One limit of one tenant. `model` is empty where it is for all of them."""

    tenant_id: str
    kind: MeterKind
    model: str = ""


class Cost(NamedTuple):
    """What one sequence asks for: tokens are its prompt's and all that it may generate.

    `models`: its adapter, and what that is made of; of the base, or a single adapter, one.
    """

    models: tuple[str, ...]
    num_tokens: int
    cost_nanos: int


class LimitReached(PolyloraError):
    """A tenant has used up what it may. `retry_after_s` None: waiting does not help."""

    def __init__(self, message: str, kind: MeterKind, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.kind, self.retry_after_s))


class AdapterQuotaReached(LimitReached):
    """A project has as many adapters, or as many bytes of them, as it may."""


class SpendReached(LimitReached):
    """Its money is used up until the month ends or somebody raises the limit."""


def limit_of(limits: TenantLimits, meter: LimitKey) -> int | None:
    """The limit that a meter is for; None: there is none (any more)."""
    if meter.kind == "concurrent":
        return limits.max_concurrent
    if meter.kind == "spend":
        return None if limits.spend_cents is None else limits.spend_cents * NANOS_PER_CENT
    rate = limits.rates.get(meter.model)
    if rate is None:
        return None
    return {"requests": rate.requests_per_min, "tokens": rate.tokens_per_min, "day": rate.requests_per_day}[meter.kind]


def limit_keys(tenant: Tenant) -> list[LimitKey]:
    """All that a tenant has limits of."""
    kinds: tuple[MeterKind, ...] = ("requests", "tokens", "day")
    rates = [LimitKey(tenant.id, kind, model) for model in sorted(tenant.limits.rates) for kind in kinds]
    all_ = [*rates, LimitKey(tenant.id, "concurrent"), LimitKey(tenant.id, "spend")]
    return [meter for meter in all_ if limit_of(tenant.limits, meter) is not None]


def request_costs(tenant: Tenant, base_name: str, needs: Sequence[Cost]) -> dict[LimitKey, int]:
    """What a request takes of each of its tenant's meters; without limits, nothing.

    It is one request of the base model, whose limits hold for everything, and one of each adapter that it asks for, by
    itself or among others.
    """
    limits = tenant.limits
    taken: dict[LimitKey, int] = {}
    if limits.rates:
        for model in {base_name, *(model for need in needs for model in need.models)} & limits.rates.keys():
            tokens = sum(need.num_tokens for need in needs if model == base_name or model in need.models)
            amounts: tuple[tuple[MeterKind, int], ...] = (("requests", 1), ("tokens", tokens), ("day", 1))
            taken |= {LimitKey(tenant.id, kind, model): amount for kind, amount in amounts}
    taken[LimitKey(tenant.id, "concurrent")] = 1
    taken[LimitKey(tenant.id, "spend")] = sum(need.cost_nanos for need in needs)
    return {meter: amount for meter, amount in taken.items() if limit_of(limits, meter) is not None}


def refusal(meter: LimitKey, amount: int, limit: int, wait_s: float) -> LimitReached:
    """Why a request is refused, with the value, the limit and the way out."""
    of = f" of model {meter.model!r}" if meter.model else ""
    if meter.kind == "spend":
        return SpendReached(
            f"the project's {_WORDS['spend']} has reached its limit of {limit / NANOS_PER_CENT / 100:.2f} USD; raise "
            "the limit or wait for the next month",
            meter.kind,
            None,
        )
    if amount > limit:
        return LimitReached(
            f"the request needs {amount} of the project's {_WORDS[meter.kind]}{of}, and the limit is {limit}; shorten "
            "the prompt, lower max_tokens, or raise the limit",
            meter.kind,
            None,
        )
    return LimitReached(
        f"the project's {_WORDS[meter.kind]}{of} have reached their limit of {limit}; try again in {wait_s:.3g} s",
        meter.kind,
        wait_s,
    )


class GcraCounter:
    """A GCRA: `limit` units in `period_s`, refilled evenly, and all of them at once after a time without use."""

    def __init__(self, limit: int, period_s: float) -> None:
        self.limit = limit
        self._period_s = period_s
        self.paid_s = -math.inf  # when all that was taken is paid for (the "theoretical arrival time")

    def remaining(self, now_s: float) -> int:
        """What may be taken now."""
        return max(0, math.floor(self.limit - self.owed(now_s) + 1e-6))

    def take(self, amount: int, now_s: float) -> int:
        """Take up to so much; returns how much it was."""
        amount = min(amount, self.remaining(now_s))
        self.charge(amount, now_s)
        return amount

    def give_back(self, amount: int, now_s: float) -> None:
        """What was taken is not needed."""
        self._owe(max(0.0, self.owed(now_s) - amount), now_s)

    def charge(self, amount: int, now_s: float) -> None:
        """So much was used, whether or not it was there."""
        self._owe(self.owed(now_s) + amount, now_s)

    def set_limit(self, limit: int, now_s: float) -> None:
        """What is used stays used, up to the new limit."""
        if limit != self.limit:
            owed = self.owed(now_s)
            self.limit = limit
            self._owe(min(owed, float(limit)), now_s)

    def owed(self, now_s: float) -> float:
        """Units that are not paid for yet."""
        return max(0.0, self.paid_s - now_s) * self.limit / self._period_s

    def _owe(self, units: float, now_s: float) -> None:
        self.paid_s = now_s + (units * self._period_s / self.limit if self.limit else 0.0)


class BudgetCounter:
    """At most `limit` in all: what is used up (`used` when this began), and what holders may give back (`get_object`).

    Holders report totals, not changes: one that is heard twice, or not at all, changes nothing for good. `used_by` is
    what each has reported so far; also who is forgotten may report more, so it is kept while this counts. Where nothing
    is used up (not `is_spent`) it stays empty.

    Who is forgotten may have used up what it held (`left`) without a word. `booked` of it counts as used: all of it
    until the ledger has been asked (`reckon`), then what the ledger has beyond `used`. It is reckoned anew and never
    added to `used`: what the ledger knows of others' use before they report it is not counted twice when they do.
    """

    def __init__(self, limit: int, used: int = 0, *, is_spent: bool) -> None:
        self.limit = limit
        self.used = used
        self.is_spent = is_spent
        self.held: dict[str, int] = {}
        self.used_by: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.booked = 0

    def remaining(self) -> int:
        """What may be taken now."""
        return max(0, self.limit - self.used - self.booked - sum(self.held.values()))

    def report(self, holder: str, holding: int, used: int) -> None:
        """A holder holds so much now, and has used up so much since it began (before it was first heard: unknown)."""
        if self.is_spent:
            self.used += used - self.used_by.get(holder, used)
            self.used_by[holder] = used
        if self.left.pop(holder, 0):
            self.booked = min(self.booked, sum(self.left.values()))
        self.held[holder] = holding

    def take(self, holder: str, amount: int) -> int:
        """Take up to so much; returns how much it was."""
        amount = min(amount, self.remaining())
        self.held[holder] = self.held.get(holder, 0) + amount
        return amount

    def forget(self, holders: Iterable[str]) -> None:
        """These are not heard any more: what they held is free, unless it may be used up.

        What they used, also what they tell later, is used.
        """
        for holder in holders:
            units = self.held.pop(holder, 0)
            if self.is_spent and units:
                self.left[holder] = units
                self.booked += units

    def reckon(self, in_ledger: int) -> None:
        """So much is used up in all, as the ledger has it now."""
        self.booked = min(max(0, in_ledger - self.used), sum(self.left.values()))


def monotonic_unix_clock(clock: Callable[[], float], monotonic: Callable[[], float]) -> Callable[[], float]:
    """Unix time as it was when this was made, and then as many seconds more as have passed: setting it changes nothing.

    A rate that is measured by what may be set refuses everybody for as long as it is set back, and lends all it has
    again when it is set forward.
    """
    began_s, passed_s = clock(), monotonic()
    return lambda: began_s + (monotonic() - passed_s)


def month_of(now_s: float) -> str:
    """The calendar month (UTC) that spend is counted in."""
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m")


def month_start_s(now_s: float) -> float:
    """When it began, as Unix time."""
    moment = datetime.fromtimestamp(now_s, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
