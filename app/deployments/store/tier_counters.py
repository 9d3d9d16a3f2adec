"""Counters of the adapter tiers: hits, misses, evictions, loads, bytes.

The tiers, fastest first: "device" (rank rows; counted by replicas), "host" (shared memory), "disk" (files of remote
adapters), "source" (where adapters come from). A miss goes on to the next tier; a load brings an adapter to the next
faster one, and device loads are writes of rows.
"""

from __future__ import annotations

import threading
from typing import Literal

Tier = Literal["device", "host", "disk", "source"]
#: The tiers of the store's process.
STORE_TIERS: tuple[Tier, ...] = ("host", "disk", "source")


class TierCounters:
    """Numbers per tier since the start, and present bytes and adapters. Callable from any thread."""

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
        """An adapter was loaded from this tier to the next faster one; `digest` if known."""
        self._add(tier, loads=1, load_s=seconds, loaded_bytes=size_bytes)

    def set_size(self, tier: Tier, size_bytes: int, number: int, limit_bytes: int | None = None) -> None:
        """limit_bytes: what the tier may hold, if its size is in bytes."""
        numbers = {"held_bytes": size_bytes, "held_adapters": number}
        if limit_bytes is not None:
            numbers["limit_bytes"] = limit_bytes
        with self._lock:
            self._counts.setdefault(tier, {}).update(numbers)

    def of(self, tier: Tier) -> dict[str, float]:
        """A copy of one tier's numbers, without those that never changed."""
        with self._lock:
            return dict(self._counts.get(tier, {}))

    def _add(self, tier: Tier, **numbers: float) -> None:
        with self._lock:
            counts = self._counts.setdefault(tier, {})
            for name, number in numbers.items():
                counts[name] = counts.get(name, 0) + number
