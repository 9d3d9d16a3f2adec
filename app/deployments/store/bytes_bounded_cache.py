"""The accounting of a cache that is bounded in bytes: which keys stay and which are evicted.

Eviction follows a policy of `app.engine.pools.eviction`, with load seconds as cost and bytes as size. Pinned keys and
keys with references are never evicted. The caller stores and deletes the things themselves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from app.engine.config import EvictionPolicy
from app.engine.pools.eviction import NEVER, EvictionOrder, Priority, TenantQuota

#: Below this a load time is noise.
_MIN_LOAD_S = 1e-4


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    load_s: float
    uses: int = 0
    num_refs: int = 0
    priority: Priority = NEVER


class BytesBoundedCache:
    """Not thread-safe."""

    def __init__(self, max_bytes: int, policy: EvictionPolicy) -> None:
        self.max_bytes = max_bytes
        self._order = EvictionOrder(policy)
        self._tenant_quota = TenantQuota()
        self._entries: dict[str, _Entry] = {}
        self._pinned: frozenset[str] = frozenset()
        self._queue: list[tuple[Priority, str]] = []  # may hold outdated priorities
        self._total_bytes = 0
        self._fixed_bytes = 0  # of present keys that are pinned or referenced

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def record_hit(self, key: str, tenant_id: str = "") -> None:
        """Record a cache hit for this tenant."""
        entry = self._entries[key]
        self._tenant_quota.record_use(key, entry.size_bytes, tenant_id)
        entry.uses += 1
        self._queue_up(key, entry)

    def _queue_up(self, key: str, entry: _Entry) -> None:
        entry.priority = self._order.on_use(entry.uses, max(entry.load_s, _MIN_LOAD_S) / max(entry.size_bytes, 1))
        heapq.heappush(self._queue, (entry.priority, key))
        if len(self._queue) > 4 * len(self._entries) + 64:
            self._queue = [(entry.priority, name) for name, entry in self._entries.items()]
            heapq.heapify(self._queue)

    def add(self, key: str, size_bytes: int, load_s: float, tenant_id: str = "") -> list[str] | None:
        """Add a new key, used once; returns the evicted keys, or None (and changes nothing) if it cannot fit.

        Keys within other tenants' quotas (`app.engine.pools.eviction`) are evicted last.
        """
        assert key not in self._entries
        if self._fixed_bytes + size_bytes > self.max_bytes:
            return None
        evicted: list[str] = []
        skipped: list[tuple[Priority, str]] = []
        spared: list[tuple[Priority, str]] = []
        while self._total_bytes + size_bytes > self.max_bytes:
            is_last_resort = not self._queue
            queued = spared.pop(0) if is_last_resort else heapq.heappop(self._queue)
            priority, candidate = queued
            entry = self._entries.get(candidate)
            if entry is None or entry.priority != priority:
                continue
            if self._is_fixed(candidate):
                skipped.append(queued)
                continue
            if not is_last_resort and self._tenant_quota.is_protected(candidate, tenant_id, self.max_bytes):
                spared.append(queued)
                continue
            self._order.on_evict(priority)
            self.remove(candidate)
            evicted.append(candidate)
        for queued in skipped + spared:
            heapq.heappush(self._queue, queued)
        self._entries[key] = _Entry(size_bytes, load_s)
        self._total_bytes += size_bytes
        self._fixed_bytes += size_bytes if self._is_fixed(key) else 0
        self.record_hit(key, tenant_id)
        return evicted

    def set_limit(self, max_bytes: int, policy: EvictionPolicy) -> list[str]:
        """Apply another limit and policy; returns the evicted keys. Pinned and referenced keys stay."""
        old = sorted(self._entries.items(), key=lambda item: item[1].priority)
        self.max_bytes, self._order, self._queue = max_bytes, EvictionOrder(policy), []
        for key, entry in old:
            entry.uses += 1
            self._queue_up(key, entry)
        evicted = []
        for key, _ in old:
            if self._total_bytes <= max_bytes:
                break
            if not self._is_fixed(key):
                self.remove(key)
                evicted.append(key)
        return evicted

    def remove(self, key: str) -> bool:
        """Remove a key, also a pinned or referenced one. False if it was not here."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._total_bytes -= entry.size_bytes
        self._fixed_bytes -= entry.size_bytes if self._is_fixed(key) else 0
        del self._entries[key]
        self._tenant_quota.remove(key)
        return True

    def pin(self, keys: Iterable[str]) -> None:
        """Pin exactly these keys, present or not."""
        before, self._pinned = self._pinned, frozenset(keys)
        for key in before ^ self._pinned:
            entry = self._entries.get(key)
            if entry is not None and not entry.num_refs:
                self._fixed_bytes += entry.size_bytes if key in self._pinned else -entry.size_bytes

    @property
    def pinned_bytes(self) -> int:
        return sum(self._entries[key].size_bytes for key in self._pinned if key in self._entries)

    def ref(self, key: str) -> None:
        """Keep the key until `unref`."""
        entry = self._entries[key]
        self._fixed_bytes += 0 if self._is_fixed(key) else entry.size_bytes
        entry.num_refs += 1

    def unref(self, key: str) -> None:
        """Has no effect if the key was removed meanwhile."""
        entry = self._entries.get(key)
        if entry is not None:
            assert entry.num_refs > 0
            entry.num_refs -= 1
            self._fixed_bytes -= 0 if self._is_fixed(key) else entry.size_bytes

    def _is_fixed(self, key: str) -> bool:
        return self._entries[key].num_refs > 0 or key in self._pinned
