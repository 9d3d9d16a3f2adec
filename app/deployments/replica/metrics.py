"""Prometheus metrics of a replica: its engine's requests, blocks and rows, and its device as a tier of adapters.

Totals of the engine (`EngineStats`) become counters by their difference from the last snapshot.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from app.deployments.store.tier_counters import TierCounters
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from app.engine.stats import EngineStats


class EngineMetrics:
    """Metrics of a replica's engine; all gauges are set at every update, so that Ray does not drop them."""

    def __init__(self, start_s: Mapping[str, float] | None = None) -> None:
        """`start_s`: seconds of the replica's start, by part."""
        tags = ("state",)
        self._engine = Gauge("polylora_engine_info", "Always 1; `engine` is what computes.", tag_keys=("engine",))
        self._start = Gauge("polylora_startup_seconds", "Seconds that a replica's start took.", tag_keys=("part",))
        self._start_s = start_s or {}
        self._compile = Gauge("polylora_compile_seconds", "Seconds of compiling kernels, programs or graphs.")
        self._requests = Gauge("polylora_engine_requests", "Requests in the engine.", tag_keys=tags)
        self._blocks = Gauge("polylora_kv_blocks", "KV blocks; cached ones can be reused.", tag_keys=tags)
        self._rows = Gauge(
            "polylora_lora_pool_rows", "Rank rows of the device; idle adapters occupy theirs.", tag_keys=tags
        )
        self._preemptions = Counter("polylora_preemptions", "Sequences preempted for others' KV blocks.")
        self._num_preemptions = 0
        self._draft_tokens = Counter(
            "polylora_spec_decode_tokens", "Verified draft tokens of speculative decoding.", tag_keys=("outcome",)
        )
        self._num_draft_tokens = {"accepted": 0, "rejected": 0}
        self._seconds = Counter("polylora_step_seconds", "Seconds that steps took, by part.", tag_keys=("part",))
        self._num_seconds = {"base": 0.0, "lora": 0.0, "adapter_load": 0.0}
        self._gap = Gauge(
            "polylora_fairness_gap_tokens", "Largest difference of waiting tenants' weighted service, in tokens."
        )

    def update(self, stats: EngineStats) -> None:
        """Export a snapshot, and the differences of totals from the last one."""
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
                {"used": stats.num_rank_rows - stats.num_rank_rows_free, "free": stats.num_rank_rows_free},
            ),
        ):
            for state, value in values.items():
                gauge.set(value, tags={"state": state})
        self._engine.set(1, tags={"engine": stats.engine})
        self._gap.set(stats.service_gap, tags={})
        for part, seconds in self._start_s.items():
            self._start.set(seconds, tags={"part": part})
        self._compile.set(stats.compile_s, tags={})
        if stats.num_preemptions > self._num_preemptions:
            self._preemptions.inc(stats.num_preemptions - self._num_preemptions)
            self._num_preemptions = stats.num_preemptions
        for part, seconds in (
            ("base", stats.base_s), ("lora", stats.lora_s), ("adapter_load", stats.adapter_write_s)
        ):  # fmt: skip
            if seconds > self._num_seconds[part]:
                self._seconds.inc(seconds - self._num_seconds[part], tags={"part": part})
                self._num_seconds[part] = seconds
        num_rejected = stats.num_draft_tokens - stats.num_accepted_tokens
        for outcome, count in {"accepted": stats.num_accepted_tokens, "rejected": num_rejected}.items():
            if count > self._num_draft_tokens[outcome]:
                self._draft_tokens.inc(count - self._num_draft_tokens[outcome], tags={"outcome": outcome})
                self._num_draft_tokens[outcome] = count


class DeviceMetrics:
    """The device as a tier of the store, from its engine's totals."""

    def __init__(self, counts: TierCounters, spec: ModelSpec) -> None:
        self._counts = counts
        layers = (layer_linear_modules(spec, layer) for layer in range(len(spec.layers)))
        modules = itertools.chain.from_iterable(layers)
        # Rows of experts are counted among an adapter's extra bytes.
        self._row_bytes = 4 * sum(module.row_size for module in modules if module.has_rank_rows)
        self._last: EngineStats | None = None

    def update(self, stats: EngineStats) -> None:
        """Count changes since the last call. Bytes are rows and extra weights as float32; idle adapters count as
        cached."""
        last = self._last
        self._last = stats

        def since(name: str) -> float:
            now: float = getattr(stats, name)
            return now - (getattr(last, name) if last is not None else 0)

        self._counts.hit("device", round(since("num_adapter_hits")))
        self._counts.miss("device", round(since("num_adapter_misses")))
        self._counts.record_evictions("device", round(since("num_adapter_evictions")))
        num_writes = round(since("num_adapter_writes"))
        for _ in range(num_writes):  # each with the mean size and duration
            size_bytes = round(since("num_adapter_write_bytes") / num_writes)
            self._counts.record_load("device", since("adapter_write_s") / num_writes, size_bytes)
        held_bytes = sum(item.num_rows * self._row_bytes + item.extra_bytes for item in stats.residents)
        self._counts.set_size("device", held_bytes, len(stats.residents))
