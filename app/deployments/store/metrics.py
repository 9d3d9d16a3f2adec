"""`TierCounters` exported to Ray's Prometheus port, with the tag `tier`."""

from __future__ import annotations

from collections.abc import Callable

from ray.util.metrics import Counter, Histogram

from app.deployments.rpc.gauges import SECONDS, SteadyGauge
from app.deployments.store.tier_counters import Tier, TierCounters


class TierMetrics(TierCounters):
    """One per process. Tag `tier`: host, disk or source in the store; device in a replica.

    `on_load` is called with the tier and digest of each load of known contents, in the loading thread.
    """

    def __init__(self, on_load: Callable[[Tier, str], None] | None = None) -> None:
        super().__init__()
        self._on_load = on_load
        tags = ("tier",)
        self._hits = Counter("polylora_adapter_hits", "Adapters found in a tier.", tag_keys=tags)
        self._misses = Counter("polylora_adapter_misses", "Adapters not found in a tier.", tag_keys=tags)
        self._evictions = Counter("polylora_adapter_evictions", "Adapters evicted from a tier.", tag_keys=tags)
        self._loaded_bytes = Counter(
            "polylora_adapter_loaded_bytes", "Bytes loaded from a tier to the next faster one.", tag_keys=tags
        )
        self._bytes = SteadyGauge("polylora_adapter_bytes", "Bytes that a tier holds.", tags)
        self._number = SteadyGauge("polylora_adapters_cached", "Adapters that a tier holds.", tags)
        self.gauges = (self._bytes, self._number)
        self._load_s = Histogram(
            "polylora_adapter_load_seconds",
            "Time to load an adapter from a tier to the next faster one.",
            boundaries=list(SECONDS),
            tag_keys=tags,
        )

    def hit(self, tier: Tier, number: int = 1) -> None:
        super().hit(tier, number)
        if number:
            self._hits.inc(number, tags={"tier": tier})

    def miss(self, tier: Tier, number: int = 1) -> None:
        super().miss(tier, number)
        if number:
            self._misses.inc(number, tags={"tier": tier})

    def record_evictions(self, tier: Tier, number: int) -> None:
        super().record_evictions(tier, number)
        if number:
            self._evictions.inc(number, tags={"tier": tier})

    def record_load(self, tier: Tier, seconds: float, size_bytes: int, digest: str | None = None) -> None:
        super().record_load(tier, seconds, size_bytes, digest)
        if digest is not None and self._on_load is not None:
            self._on_load(tier, digest)
        self._load_s.observe(seconds, tags={"tier": tier})
        self._loaded_bytes.inc(max(size_bytes, 1), tags={"tier": tier})

    def set_size(self, tier: Tier, size_bytes: int, number: int, limit_bytes: int | None = None) -> None:
        super().set_size(tier, size_bytes, number, limit_bytes)
        self._bytes.set(size_bytes, tier=tier)
        self._number.set(number, tier=tier)
