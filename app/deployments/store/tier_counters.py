"""What each tier of adapters did: hits, misses, evictions, bytes, seconds.

In: events from the host and disk tiers, from any thread. Out: counts. The tiers, fastest first: "host" (shared
memory), "disk" (files of remote adapters), "source" (where adapters come from); replicas count "device" (rank
rows). A hit is a need that the tier met; a miss went on to the next. What is brought up to the device is counted
there: its loads are writes of rows. Exporting the counts is left to `metrics.TierMetrics`.
"""

from __future__ import annotations

import threading
from typing import Literal

Tier = Literal["device", "host", "disk", "source"]
#: Those of the store.
TIERS: tuple[Tier, ...] = ("host", "disk", "source")


class TierCounters:
    """Numbers by tier, since the start; bytes and adapters as of now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, float]] = {}

    def hit(self, tier: Tier, number: int = 1) -> None:
        self._add(tier, hits=number)

    def miss(self, tier: Tier, number: int = 1) -> None:
        self._add(tier, misses=number)

    def record_evictions(self, tier: Tier, number: int) -> None:
        self._add(tier, evictions=number)

    def record_load(self, tier: Tier, seconds: float, size_bytes: int, digest: str | None = None) -> None:  # noqa: ARG002
        """An adapter was brought up from this tier to the next faster one; `digest` where it is known which."""
        self._add(tier, loads=1, load_s=seconds, loaded_bytes=size_bytes)

    def set_size(self, tier: Tier, size_bytes: int, number: int) -> None:
        with self._lock:
            self._counts.setdefault(tier, {}).update(held_bytes=size_bytes, held_adapters=number)

    def of(self, tier: Tier) -> dict[str, float]:
        """A copy of one tier's numbers; those that never changed are left out."""
        with self._lock:
            return dict(self._counts.get(tier, {}))

    def _add(self, tier: Tier, **numbers: float) -> None:
        with self._lock:
            counts = self._counts.setdefault(tier, {})
            for name, number in numbers.items():
                counts[name] = counts.get(name, 0) + number
