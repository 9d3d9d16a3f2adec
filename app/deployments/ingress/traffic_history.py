"""An hour of an ingress's traffic in five-second buckets, in memory, for the console's charts without Prometheus.

It has the requests of this process only, and starts empty with it. Each of the most recent tenants has a history of its
own, so that a project sees its own numbers and no one else's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.deployments.tenancy.usage.adapter_stats import Activity

BUCKET_S = 5
NUM_BUCKETS = 3600 // BUCKET_S
#: Tenants with a history; the one with the oldest last request is forgotten first.
MAX_TENANTS = 256
#: Statuses that refuse a request because of a limit or missing capacity.
REFUSALS = frozenset({429, 503})
_NONE = Activity()


@dataclass(slots=True)
class Gauges:
    """What a bucket saw of the service at its start."""

    num_open: int = 0
    num_queued: int = 0
    num_replicas: int = 0


@dataclass(slots=True)
class Bucket:
    """`number`: its Unix time in units of `BUCKET_S`."""

    number: int
    activity: Activity = _NONE
    num_refused: int = 0
    gauges: Gauges | None = None


@dataclass(slots=True)
class _History:
    buckets: deque[Bucket] = field(default_factory=lambda: deque(maxlen=NUM_BUCKETS))

    def at(self, number: int) -> Bucket:
        if not self.buckets or self.buckets[-1].number < number:
            self.buckets.append(Bucket(number))
        return self.buckets[-1]


class TrafficHistory:
    """One per ingress. `clock` gives Unix time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = _History()
        self._tenants: OrderedDict[str, _History] = OrderedDict()

    def record(self, tenant_id: str | None, activity: Activity, *, is_refused: bool) -> None:
        """Count a finished request; `tenant_id` is None if it was refused before its tenant was known."""
        number = self._number()
        histories = [self._all]
        if tenant_id is not None:
            histories.append(self._tenants.setdefault(tenant_id, _History()))
            self._tenants.move_to_end(tenant_id)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        for history in histories:
            bucket = history.at(number)
            bucket.activity = bucket.activity.plus(activity)
            bucket.num_refused += is_refused

    def sample(self, gauges: Gauges) -> None:
        """Note the gauges of the present bucket."""
        self._all.at(self._number()).gauges = gauges

    def series(self, since_s: float, tenant_id: str | None = None) -> dict[str, list[Any]]:
        """Columns of the complete buckets that start after `since_s`, the oldest first; only a tenant's if given.

        `times`: when each begins. Quantiles of the time to first token are null without one. A bucket in which nothing
        happened is absent.
        """
        history = self._all if tenant_id is None else self._tenants.get(tenant_id, _History())
        now = self._number()
        rows = [
            each
            for each in history.buckets
            if since_s < each.number * BUCKET_S and now - NUM_BUCKETS <= each.number < now
        ]
        return _columns(rows, has_gauges=tenant_id is None)

    def _number(self) -> int:
        return int(self._clock() // BUCKET_S)


def _columns(rows: Sequence[Bucket], *, has_gauges: bool) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "times": [row.number * BUCKET_S for row in rows],
        "requests": [row.activity.num_requests for row in rows],
        "errors": [row.activity.num_errors for row in rows],
        "refused": [row.num_refused for row in rows],
        "prompt_tokens": [row.activity.prompt_tokens for row in rows],
        "cached_tokens": [row.activity.cached_tokens for row in rows],
        "completion_tokens": [row.activity.completion_tokens for row in rows],
        "time_to_first_token_p50": [_quantile(row, 0.5) for row in rows],
        "time_to_first_token_p99": [_quantile(row, 0.99) for row in rows],
    }
    if has_gauges:
        columns |= {
            "open": [row.gauges and row.gauges.num_open for row in rows],
            "queued": [row.gauges and row.gauges.num_queued for row in rows],
            "replicas": [row.gauges and row.gauges.num_replicas for row in rows],
        }
    return columns


def _quantile(row: Bucket, part: float) -> float | None:
    return round(row.activity.first_token_quantile_s(part), 4) if row.activity.first_tokens else None
