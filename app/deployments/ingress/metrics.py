"""What operators see of ingresses, replicas and the store, through `ray.util.metrics` (Prometheus on Ray's port).

In: finished requests, what the tiers of adapters did, snapshots of an engine. Out: counters, gauges and histograms.
Labels take few values each (route, status class, base or adapter, tier, state): never an adapter's or a tenant's name,
of which there may be millions. Ray forgets a gauge that nobody sets again: gauges that follow changes are
`SteadyGauge`s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from app.deployments.ingress.http.errors import TABLE, ClientGone
from app.deployments.store.counts import Tier, TierCounts
from app.engine.adapters.lora import TARGETS
from app.engine.models.spec import ModelSpec
from app.engine.request import Usage
from app.engine.stats import EngineStats

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_TOKEN_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5]
#: A gauge lives for two of Ray's reports, which are 10 s apart.
REPEAT_S = 5.0


class SteadyGauge:
    """A gauge that is set when its value changes, and once more at every `repeat`."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
        self._gauge = Gauge(name, description, tag_keys=tag_keys)
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, **tags: str) -> None:
        self._values[tuple(sorted(tags.items()))] = value
        self._gauge.set(value, tags=tags)

    def repeat(self) -> None:
        for tags, value in self._values.copy().items():  # tiers are changed by other threads, too
            self._gauge.set(value, tags=dict(tags))


async def repeat_gauges(gauges: Sequence[SteadyGauge]) -> None:
    """For as long as the process lives; a task of its event loop."""
    while True:
        await asyncio.sleep(REPEAT_S)
        for gauge in gauges:
            gauge.repeat()


class IngressMetrics:
    """One per ingress process."""

    def __init__(self) -> None:
        self._requests = Counter("polylora_requests", "Requests answered.", tag_keys=("route", "status", "kind"))
        self._prompt_tokens = Counter("polylora_prompt_tokens", "Prompt tokens.", tag_keys=("kind",))
        self._cached_tokens = Counter("polylora_cached_tokens", "Prompt tokens found in the cache.", tag_keys=("kind",))
        self._completion_tokens = Counter("polylora_completion_tokens", "Generated tokens.", tag_keys=("kind",))
        self._latency_s = Histogram(
            "polylora_request_seconds", "From arrival to the last token.", boundaries=_SECONDS, tag_keys=("route",)
        )
        self._first_token_s = Histogram(
            "polylora_time_to_first_token_seconds",
            "From arrival to the first text.",
            boundaries=_SECONDS,
            tag_keys=("route",),
        )
        self._per_token_s = Histogram(
            "polylora_time_per_output_token_seconds",
            "Between tokens of an answer, on average.",
            boundaries=_TOKEN_SECONDS,
            tag_keys=("route",),
        )
        self._adapters = SteadyGauge("polylora_registered_adapters", "Adapters in the registry.")
        self.gauges = (self._adapters,)

    def request(
        self,
        route: str,
        status: int,
        *,
        arrival_s: float | None,
        first_s: float | None,
        is_adapter: bool,
        usages: Sequence[Usage | None],
    ) -> None:
        """One request has ended; `status` is what the client was told, 499 if it left before it was told all.

        arrival_s, first_s: when it came and when its first text was there, if they are known (Unix time).
        """
        kind = {"kind": "adapter" if is_adapter else "base"}
        has_left = status == TABLE[ClientGone].status
        status_class = str(status) if has_left else f"{status // 100}xx"
        self._requests.inc(tags={"route": route, "status": status_class} | kind)
        known = [usage for usage in usages if usage is not None]
        for counter, number in (
            (self._prompt_tokens, sum(usage.prompt_tokens for usage in known)),
            (self._cached_tokens, sum(usage.cached_tokens for usage in known)),
            (self._completion_tokens, sum(usage.completion_tokens for usage in known)),
        ):
            if number:
                counter.inc(number, tags=kind)
        now_s, tags = time.time(), {"route": route}
        if arrival_s is not None and not has_left:
            self._latency_s.observe(now_s - arrival_s, tags=tags)
        if arrival_s is not None and first_s is not None:
            self._first_token_s.observe(first_s - arrival_s, tags=tags)
        longest = max((usage.completion_tokens for usage in known), default=0)
        if first_s is not None and status == 200 and longest > 1:
            self._per_token_s.observe((now_s - first_s) / (longest - 1), tags=tags)

    def adapters(self, number: int) -> None:
        self._adapters.set(number)


class TierMetrics(TierCounts):
    """Counts that are exported too; one per process. Tag `tier`: host, disk or source in the store, else device."""

    def __init__(self) -> None:
        super().__init__()
        tags = ("tier",)
        self._hits = Counter("polylora_adapter_hits", "Adapters found in a tier.", tag_keys=tags)
        self._misses = Counter("polylora_adapter_misses", "Adapters not found in a tier.", tag_keys=tags)
        self._evictions = Counter("polylora_adapter_evictions", "Adapters that left a tier for others.", tag_keys=tags)
        self._loaded_bytes = Counter("polylora_adapter_loaded_bytes", "Bytes brought up from a tier.", tag_keys=tags)
        self._bytes = SteadyGauge("polylora_adapter_bytes", "Bytes that a tier holds.", tags)
        self._number = SteadyGauge("polylora_adapters_held", "Adapters that a tier holds.", tags)
        self.gauges = (self._bytes, self._number)
        self._load_s = Histogram(
            "polylora_adapter_load_seconds", "To bring one up from a tier.", boundaries=_SECONDS, tag_keys=tags
        )

    def hit(self, tier: Tier, number: int = 1) -> None:
        super().hit(tier, number)
        if number:
            self._hits.inc(number, tags={"tier": tier})

    def miss(self, tier: Tier, number: int = 1) -> None:
        super().miss(tier, number)
        if number:
            self._misses.inc(number, tags={"tier": tier})

    def evicted(self, tier: Tier, number: int) -> None:
        super().evicted(tier, number)
        if number:
            self._evictions.inc(number, tags={"tier": tier})

    def loaded(self, tier: Tier, seconds: float, size_bytes: int) -> None:
        super().loaded(tier, seconds, size_bytes)
        self._load_s.observe(seconds, tags={"tier": tier})
        self._loaded_bytes.inc(max(size_bytes, 1), tags={"tier": tier})

    def holds(self, tier: Tier, size_bytes: int, number: int) -> None:
        super().holds(tier, size_bytes, number)
        self._bytes.set(size_bytes, tier=tier)
        self._number.set(number, tier=tier)


class EngineMetrics:
    """What a replica's engine holds, and what waits for it; set again at every look, so Ray does not forget it."""

    def __init__(self) -> None:
        tags = ("state",)
        self._requests = Gauge("polylora_engine_requests", "Requests in the engine.", tag_keys=tags)
        self._blocks = Gauge("polylora_kv_blocks", "KV blocks; cached ones can be had.", tag_keys=tags)
        self._rows = Gauge("polylora_rank_rows", "Rank rows of the device; idle adapters hold theirs.", tag_keys=tags)
        self._preemptions = Counter("polylora_preemptions", "Sequences that gave up their KV blocks to others.")
        self._num_preemptions = 0

    def update(self, stats: EngineStats) -> None:
        """Tell a snapshot, and the preemptions since the last one."""
        num_cached = stats.num_blocks_cached
        for gauge, values in (
            (self._requests, {"running": stats.num_running, "waiting": stats.num_waiting}),
            (
                self._blocks,
                {
                    "used": stats.num_blocks - stats.num_blocks_free,
                    "cached": num_cached,
                    "free": stats.num_blocks_free - num_cached,
                },
            ),
            (
                self._rows,
                {"held": stats.num_rank_rows - stats.num_rank_rows_free, "free": stats.num_rank_rows_free},
            ),
        ):
            for state, value in values.items():
                gauge.set(value, tags={"state": state})
        if stats.num_preemptions > self._num_preemptions:
            self._preemptions.inc(stats.num_preemptions - self._num_preemptions)
            self._num_preemptions = stats.num_preemptions


class DeviceMetrics:
    """A replica's device as a tier, from its engine's totals: what it holds, not what passes through."""

    def __init__(self, counts: TierCounts, spec: ModelSpec) -> None:
        self._counts = counts
        shapes = [spec.target_shape(layer, target) for layer in range(len(spec.layers)) for target in TARGETS]
        self._row_bytes = 4 * sum(d_in + d_out for d_in, d_out in shapes)
        self._last: EngineStats | None = None

    def update(self, stats: EngineStats) -> None:
        """Count what happened since the last call. Bytes are rows and extras as float32; idle adapters are held too."""
        last = self._last
        self._last = stats

        def since(name: str) -> float:
            now: float = getattr(stats, name)
            return now - (getattr(last, name) if last is not None else 0)

        self._counts.hit("device", round(since("num_adapter_hits")))
        self._counts.miss("device", round(since("num_adapter_misses")))
        self._counts.evicted("device", round(since("num_adapter_evictions")))
        num_writes = round(since("num_adapter_writes"))
        for _ in range(num_writes):  # each as long as the mean of them
            size_bytes = round(since("num_adapter_write_bytes") / num_writes)
            self._counts.loaded("device", since("adapter_write_s") / num_writes, size_bytes)
        held_bytes = sum(item.num_rows * self._row_bytes + item.extra_bytes for item in stats.residents)
        self._counts.holds("device", held_bytes, len(stats.residents))
