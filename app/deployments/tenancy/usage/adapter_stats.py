"""Statistics of every adapter, in the process of the store: totals per adapter, and the busiest ones lately.

Memory is bounded: the least recently requested contents are evicted, totals say since when they are complete, and few
adapters are named in metrics. It is not the ledger: it starts empty with its process, and lacks what a killed ingress
had not reported.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.deployments.tenancy.usage.tenant_throughput import MAX_NAMED, OTHER, SlidingSums, weighted_tokens
from app.engine.adapters.card import AdapterRef
from app.engine.wire_format import message

#: Contents and (contents, tenant, name) entries that are kept together.
MAX_ENTRIES = 16_384
#: Characters of a digest in metric labels and in the log.
SHORT_DIGEST = 12
#: Upper bound of the first bucket of times to first token. Bounds grow by the square root of two, so histograms add
#: without loss and a quantile is within a fifth of the true one up to an hour.
SHORTEST_S = 0.001
_LAST_BUCKET = 44  # an hour and more


@message
class ActivityKey(NamedTuple):
    """A tenant and the adapter it requested, which belongs to `owner_id`, possibly another tenant."""

    tenant_id: str
    owner_id: str
    name: str
    digest: str


@message
class Activity(NamedTuple):
    """Sums. `first_token_s`: total time to first token; `first_tokens`: counts by histogram bucket."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    first_tokens: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Activity) -> Activity:
        first_tokens = self.first_tokens or other.first_tokens
        if self.first_tokens and other.first_tokens:
            counts = Counter(dict(self.first_tokens))
            counts.update(dict(other.first_tokens))
            first_tokens = tuple(sorted(counts.items()))
        return Activity(
            self.num_requests + other.num_requests,
            self.num_errors + other.num_errors,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.first_token_s + other.first_token_s,
            first_tokens,
        )

    @property
    def num_first_tokens(self) -> int:
        """Requests with a known time to first token."""
        return sum(count for _, count in self.first_tokens)

    def first_token_quantile_s(self, part: float) -> float:
        """The quantile `part` of the time to first token, 0 < part <= 1. Raises ValueError without any."""
        num_left = math.ceil(part * self.num_first_tokens)
        for bucket, count in self.first_tokens:
            num_left -= count
            if num_left <= 0:
                return SHORTEST_S * 2 ** ((bucket - 0.5) / 2)  # the bucket's middle
        raise ValueError("no time to first token was recorded")


@message
class ActivityStats(NamedTuple):
    """Totals of an adapter since some time (Unix seconds). `num_loads`: by the tier it was loaded from; a load to a
    device counts as "device".
    """

    since_s: float
    activity: Activity
    num_loads: Mapping[str, int]


class Adapter(NamedTuple):
    """One name of one tenant, and its contents. `OTHERS` stands for all that are not named."""

    owner_id: str
    name: str
    digest: str


OTHERS = Adapter("", OTHER, "")


class BusyAdapters(NamedTuple):
    """An adapter's last minute. `num_loads` are those of its contents, listed with the busiest name that has them."""

    adapter: Adapter
    activity: Activity
    num_loads: Mapping[str, int]


@dataclass(slots=True)
class _Contents:
    since_s: float
    activities: dict[ActivityKey, Activity] = field(default_factory=dict)
    num_loads: Counter[str] = field(default_factory=Counter)


class AdapterStatsTable:
    """Thread-safe. `clock` gives Unix time, `monotonic` seconds that no change of the clock moves."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_entries: int = MAX_ENTRIES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._since_s = clock()  # contents without an entry had no activity since then
        self._contents: OrderedDict[str, _Contents] = OrderedDict()  # least recently requested first
        self._num_entries = 0
        self._recent: SlidingSums[Adapter, Activity] = SlidingSums(monotonic, Activity.plus)
        self._recent_loads: SlidingSums[tuple[str, str], int] = SlidingSums(monotonic, operator.add)

    def add(self, rows: Iterable[tuple[ActivityKey, Activity]]) -> None:
        """Add requests that ended."""
        with self._lock:
            for key, activity in rows:
                activities = self._contents_of(key.digest).activities
                self._num_entries += key not in activities
                activities[key] = activities.get(key, Activity()).plus(activity)
                self._recent.add(Adapter(key.owner_id, key.name, key.digest), activity)
            self._evict()

    def record_load(self, tier: str, digest: str, number: int = 1) -> None:
        """Count loads of these contents from a tier."""
        with self._lock:
            self._contents_of(digest).num_loads[tier] += number
            self._recent_loads.add((digest, tier), number)
            self._evict()

    def stats(self, ref: AdapterRef, *, tenant_id: str | None) -> ActivityStats:
        """Totals of a name and its contents: requests of one tenant (None: of all). Loads are those of all tenants."""
        with self._lock:
            found = self._contents.get(ref.digest)
            if found is None:
                return ActivityStats(self._since_s, Activity(), {})
            activity = Activity()
            for key, each in found.activities.items():
                is_asked = tenant_id in (None, key.tenant_id)
                if is_asked and (key.owner_id, key.name) == (ref.tenant_id, ref.name):
                    activity = activity.plus(each)
            return ActivityStats(found.since_s, activity, dict(found.num_loads))

    def busiest(self) -> Sequence[BusyAdapters]:
        """The `MAX_NAMED` busiest adapters of the last minute, and `OTHERS` if there are more."""
        with self._lock:
            recent, recent_loads = self._recent.sums(), self._recent_loads.sums()
        order = sorted(recent, key=lambda adapter: (-_service(recent[adapter]), -recent[adapter].num_requests, adapter))
        named, rest = order[:MAX_NAMED], Activity()
        for adapter in order[MAX_NAMED:]:
            rest = rest.plus(recent[adapter])
        first = {adapter.digest: adapter for adapter in reversed(named)}
        num_loads: dict[Adapter, Counter[str]] = {adapter: Counter() for adapter in (*named, OTHERS)}
        for (digest, tier), number in recent_loads.items():
            num_loads[first.get(digest, OTHERS)][tier] += number
        busiest = [BusyAdapters(adapter, recent[adapter], num_loads[adapter]) for adapter in named]
        return (
            [*busiest, BusyAdapters(OTHERS, rest, num_loads[OTHERS])]
            if rest.num_requests or num_loads[OTHERS]
            else busiest
        )

    def _contents_of(self, digest: str) -> _Contents:
        found = self._contents.get(digest)
        if found is None:
            found = self._contents[digest] = _Contents(self._since_s)
            self._num_entries += 1
        self._contents.move_to_end(digest)
        return found

    def _evict(self) -> None:
        while self._num_entries > self._max_entries and len(self._contents) > 1:
            _, evicted = self._contents.popitem(last=False)
            self._num_entries -= 1 + len(evicted.activities)
            self._since_s = self._clock()


def first_token(seconds: float) -> Activity:
    """An `Activity` of one time to first token and nothing else."""
    bucket = math.ceil(2 * math.log2(max(seconds, SHORTEST_S) / SHORTEST_S))
    return Activity(first_token_s=seconds, first_tokens=((min(bucket, _LAST_BUCKET), 1),))


def _service(activity: Activity) -> float:
    return weighted_tokens(activity.prompt_tokens, activity.cached_tokens, activity.completion_tokens)
