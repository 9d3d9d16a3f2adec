"""An hour of the service's traffic in five-second buckets, in the memory of the store's process, for the console's
charts without Prometheus.

Every ingress reports its part of a bucket, and the parts are added up. The history starts empty with its process, and
lacks what a killed ingress had not reported, `REPORT_INTERVAL_S` at most. Each of the most recent tenants has a history
of its own, so that a project sees its own numbers and no one else's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.deployments.rpc.actor_proxy import remote_method
from app.deployments.tenancy.usage.adapter_stats import Activity
from app.engine.wire_format import message

BUCKET_S = 5
NUM_BUCKETS = 3600 // BUCKET_S
#: How often an ingress reports.
REPORT_INTERVAL_S = 2.0
#: A bucket is complete this long after its end, when every ingress has reported its part. Later parts are still added,
#: but who has read the bucket does not see them.
SETTLE_S = 3
#: What an ingress had open counts until this long after its report.
OPEN_S = 15.0
#: Tenants with a history; the one with the oldest last request is forgotten first.
MAX_TENANTS = 256
_NONE = Activity()


@message
class Gauges(NamedTuple):
    """What an ingress saw at the start of a bucket. `num_open`: its own requests. `num_queued`: on all replicas."""

    num_open: int = 0
    num_queued: int = 0
    num_replicas: int = 0

    def plus(self, other: Gauges | None) -> Gauges:
        """Add another ingress: its own requests, and the larger of what both saw of the replicas."""
        if other is None:
            return self
        num_queued = max(self.num_queued, other.num_queued)
        return Gauges(self.num_open + other.num_open, num_queued, max(self.num_replicas, other.num_replicas))


@message
class BucketPart(NamedTuple):
    """What one ingress adds to a bucket. `number`: the bucket's Unix time in units of `BUCKET_S`. `tenant_id`: None for
    requests that were refused before their tenant was known, and for gauges."""

    number: int
    tenant_id: str | None
    activity: Activity = _NONE
    num_refused: int = 0
    gauges: Gauges | None = None

    def plus(self, other: BucketPart) -> BucketPart:
        return self._replace(
            activity=self.activity.plus(other.activity),
            num_refused=self.num_refused + other.num_refused,
            gauges=self.gauges if other.gauges is None else other.gauges.plus(self.gauges),
        )


class TrafficHistory:
    """One per store, on its event loop. `clock` gives Unix time, `monotonic` seconds that no change of the clock
    moves."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._all: dict[int, BucketPart] = {}  # by number
        self._tenants: OrderedDict[str, dict[int, BucketPart]] = OrderedDict()
        self._open: dict[str, tuple[float, int]] = {}  # by ingress: when it was reported, and how many

    @remote_method
    async def add(self, ingress_id: str, parts: Sequence[BucketPart]) -> None:
        """Add an ingress's parts since its last report."""
        for part in parts:
            self._add_to(self._all, part)
            if part.gauges is not None:
                self._open[ingress_id] = self._monotonic(), part.gauges.num_open
            if part.tenant_id is not None:
                self._add_to(self._tenants.setdefault(part.tenant_id, {}), part)
                self._tenants.move_to_end(part.tenant_id)
                if len(self._tenants) > MAX_TENANTS:
                    self._tenants.popitem(last=False)

    @remote_method
    async def num_open_elsewhere(self, ingress_id: str) -> int:
        """Requests that the other ingresses had open when they last reported."""
        since_s = self._monotonic() - OPEN_S
        self._open = {each: found for each, found in self._open.items() if found[0] >= since_s}
        return sum(number for each, (_, number) in self._open.items() if each != ingress_id)

    @remote_method
    async def series(self, since_s: float, tenant_id: str | None) -> dict[str, list[Any]]:
        """Columns of the complete buckets that start after `since_s`, the oldest first; only a tenant's if given.

        `times`: when each begins. Quantiles of the time to first token are null without one. A bucket in which nothing
        happened is absent.
        """
        history = self._all if tenant_id is None else self._tenants.get(tenant_id, {})
        end = int((self._clock() - SETTLE_S) // BUCKET_S)
        first = max(end - NUM_BUCKETS, int(since_s // BUCKET_S) + 1)
        numbers = sorted(number for number in history if first <= number < end)
        return _columns(numbers, [history[number] for number in numbers], has_gauges=tenant_id is None)

    def _add_to(self, history: dict[int, BucketPart], part: BucketPart) -> None:
        now = int(self._clock() // BUCKET_S)
        number = min(part.number, now)  # another machine's clock may be ahead
        if number < now - NUM_BUCKETS:
            return
        if number not in history:
            for each in [each for each in history if not now - NUM_BUCKETS <= each <= now]:
                del history[each]
        history[number] = history[number].plus(part) if number in history else part


def _columns(numbers: Sequence[int], rows: Sequence[BucketPart], *, has_gauges: bool) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "times": [number * BUCKET_S for number in numbers],
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


def _quantile(row: BucketPart, part: float) -> float | None:
    return round(row.activity.first_token_quantile_s(part), 4) if row.activity.first_tokens else None
