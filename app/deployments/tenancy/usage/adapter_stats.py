"""What is seen of every adapter, in the process of the store: in all, for whoever asks for one, and the busiest lately.

In: what ingresses saw of requests, and loads of the tiers. Out: what is known of one adapter, and the adapters that
were busiest in the last minute, all others together. Rule: whatever there is, it fits: the contents that were asked for
longest ago are forgotten, nothing is said of a time of which something was forgotten, and few adapters are named.
It is not the ledger: it begins anew with its process, and what an ingress that is killed has not told is not in it.
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

#: Adapters by who asked for them, of which something is known.
MAX_KEPT = 16_384
#: Characters of a digest in a metric's label, and in the log.
SHORT_DIGEST = 12
#: Times to first token are counted in buckets whose bounds grow by the square root of two, so that adding loses nothing
#: and a quantile is within a fifth of the true one between this and an hour. What is shorter is in the first bucket.
SHORTEST_S = 0.001
_LAST_BUCKET = 44  # an hour and more


@message
class ActivityKey(NamedTuple):
    """Whose requests, and for which adapter: it is `owner_id`'s, who need not be `tenant_id`, who asked."""

    tenant_id: str
    owner_id: str
    name: str
    digest: str


@message
class Activity(NamedTuple):
    """Amounts. `first_token_s` is the sum of times, `first_tokens` how many were in which bucket, by bucket."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    first_tokens: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Activity) -> Activity:
        counts = Counter(dict(self.first_tokens))
        counts.update(dict(other.first_tokens))
        return Activity(
            self.num_requests + other.num_requests,
            self.num_errors + other.num_errors,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.first_token_s + other.first_token_s,
            tuple(sorted(counts.items())),
        )

    @property
    def num_first_tokens(self) -> int:
        """Requests whose time to first token is known."""
        return sum(count for _, count in self.first_tokens)

    def first_token_quantile_s(self, part: float) -> float:
        """The time within which that part of the first tokens came, 0 < part <= 1. Raises ValueError where none did."""
        left = math.ceil(part * self.num_first_tokens)
        for bucket, count in self.first_tokens:
            left -= count
            if left <= 0:
                return SHORTEST_S * 2 ** ((bucket - 0.5) / 2)  # its middle
        raise ValueError("no first token was seen")


@message
class ActivityStats(NamedTuple):
    """What is known of an adapter since some time (Unix seconds). `num_loads`: by the tier it was brought up from; what
    is brought to a device is a load of "device"."""

    since_s: float
    activity: Activity
    num_loads: Mapping[str, int]


class Adapter(NamedTuple):
    """One name of one tenant, and what it meant. `REST` stands for those that are not named."""

    owner_id: str
    name: str
    digest: str


REST = Adapter("", OTHER, "")


class BusyAdapters(NamedTuple):
    """An adapter in the last minute. `num_loads` are of its contents, told with the busiest name that means them."""

    adapter: Adapter
    activity: Activity
    num_loads: Mapping[str, int]


@dataclass(slots=True)
class _Contents:
    since_s: float
    activities: dict[ActivityKey, Activity] = field(default_factory=dict)
    num_loads: Counter[str] = field(default_factory=Counter)


class AdapterStatsTable:
    """Any thread. `clock` gives Unix time, `monotonic` seconds that no change of the time moves."""

    def __init__(
        self, clock: Callable[[], float], max_kept: int = MAX_KEPT, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._since_s = clock()  # of contents that are not here: nothing happened to them since then
        self._contents: OrderedDict[str, _Contents] = OrderedDict()  # the longest ago asked for is the first
        self._num_kept = 0
        self._recent: SlidingSums[Adapter, Activity] = SlidingSums(monotonic, Activity.plus)
        self._recent_loads: SlidingSums[tuple[str, str], int] = SlidingSums(monotonic, operator.add)

    def add(self, rows: Iterable[tuple[ActivityKey, Activity]]) -> None:
        """Requests have ended."""
        with self._lock:
            for key, activity in rows:
                activities = self._of(key.digest).activities
                self._num_kept += key not in activities
                activities[key] = activities.get(key, Activity()).plus(activity)
                self._recent.add(Adapter(key.owner_id, key.name, key.digest), activity)
            self._bound()

    def loaded(self, tier: str, digest: str, number: int = 1) -> None:
        """These contents were brought up from a tier, so many times."""
        with self._lock:
            self._of(digest).num_loads[tier] += number
            self._recent_loads.add((digest, tier), number)
            self._bound()

    def seen(self, ref: AdapterRef, *, tenant_id: str | None) -> ActivityStats:
        """Of a name and what it means: the requests of one tenant; None: everybody's. Loads are everybody's."""
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
        """The `MAX_NAMED` that were served most in the last minute, and `REST` if there were others."""
        with self._lock:
            recent, recent_loads = self._recent.sums(), self._recent_loads.sums()
        order = sorted(recent, key=lambda adapter: (-_service(recent[adapter]), -recent[adapter].num_requests, adapter))
        named, rest = order[:MAX_NAMED], Activity()
        for adapter in order[MAX_NAMED:]:
            rest = rest.plus(recent[adapter])
        first = {adapter.digest: adapter for adapter in reversed(named)}
        num_loads: dict[Adapter, Counter[str]] = {adapter: Counter() for adapter in (*named, REST)}
        for (digest, tier), number in recent_loads.items():
            num_loads[first.get(digest, REST)][tier] += number
        told = [BusyAdapters(adapter, recent[adapter], num_loads[adapter]) for adapter in named]
        return [*told, BusyAdapters(REST, rest, num_loads[REST])] if rest.num_requests or num_loads[REST] else told

    def _of(self, digest: str) -> _Contents:
        found = self._contents.get(digest)
        if found is None:
            found = self._contents[digest] = _Contents(self._since_s)
            self._num_kept += 1
        self._contents.move_to_end(digest)
        return found

    def _bound(self) -> None:
        while self._num_kept > self._max_kept and len(self._contents) > 1:
            _, forgotten = self._contents.popitem(last=False)
            self._num_kept -= 1 + len(forgotten.activities)
            self._since_s = self._clock()


def first_token(seconds: float) -> Activity:
    """One request's time to first token, and nothing else of it."""
    bucket = math.ceil(2 * math.log2(max(seconds, SHORTEST_S) / SHORTEST_S))
    return Activity(first_token_s=seconds, first_tokens=((min(bucket, _LAST_BUCKET), 1),))


def _service(activity: Activity) -> float:
    return weighted_tokens(activity.prompt_tokens, activity.cached_tokens, activity.completion_tokens)
