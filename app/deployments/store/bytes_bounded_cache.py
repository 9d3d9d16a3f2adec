"""A set of things with sizes that never exceeds a number of bytes: who stays, who goes.

In: keys with their sizes and what loading them cost. Out: what must go to make room, in the order of a policy
(`app.engine.pools.eviction`), cost being load seconds and room bytes. Neither a pinned
thing nor one that is referred to is ever given up. Storing the things themselves, and deleting them, is the caller's.
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
class _Kept:
    size_bytes: int
    load_s: float
    uses: int = 0
    num_refs: int = 0
    priority: Priority = NEVER


class BytesBoundedCache:
    """The books of one tier. Not for several threads at once."""

    def __init__(self, max_bytes: int, policy: EvictionPolicy) -> None:
        self.max_bytes = max_bytes
        self._order = EvictionOrder(policy)
        self._shares = TenantQuota()
        self._kept: dict[str, _Kept] = {}
        self._pinned: frozenset[str] = frozenset()
        self._queue: list[tuple[Priority, str]] = []  # may hold outdated priorities
        self._total_bytes = 0
        self._fixed_bytes = 0  # of what is here and pinned, or referred to

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def use(self, key: str, tenant_id: str = "") -> None:
        """It was wanted, by this tenant, and is here."""
        storage = self._kept[key]
        self._shares.record_use(key, storage.size_bytes, tenant_id)
        storage.uses += 1
        self._queue_up(key, storage)

    def _queue_up(self, key: str, storage: _Kept) -> None:
        storage.priority = self._order.on_use(
            storage.uses, max(storage.load_s, _MIN_LOAD_S) / max(storage.size_bytes, 1)
        )
        heapq.heappush(self._queue, (storage.priority, key))
        if len(self._queue) > 4 * len(self._kept) + 64:
            self._queue = [(entry.priority, name) for name, entry in self._kept.items()]
            heapq.heapify(self._queue)

    def add(self, key: str, size_bytes: int, load_s: float, tenant_id: str = "") -> list[str] | None:
        """Take in a new thing, used once: what goes for it, or None (and nothing changes) if it cannot fit.

        What others keep of their share (`app.engine.pools.eviction`) goes when there is nothing else.
        """
        assert key not in self._kept
        if self._fixed_bytes + size_bytes > self.max_bytes:
            return None
        evicted: list[str] = []
        skipped: list[tuple[Priority, str]] = []
        spared: list[tuple[Priority, str]] = []
        while self._total_bytes + size_bytes > self.max_bytes:
            is_last_resort = not self._queue
            entry = spared.pop(0) if is_last_resort else heapq.heappop(self._queue)
            priority, candidate = entry
            storage = self._kept.get(candidate)
            if storage is None or storage.priority != priority:
                continue
            if self._is_fixed(candidate):
                skipped.append(entry)
                continue
            if not is_last_resort and self._shares.is_protected(candidate, tenant_id, self.max_bytes):
                spared.append(entry)
                continue
            self._order.on_evict(priority)
            self.remove(candidate)
            evicted.append(candidate)
        for entry in skipped + spared:
            heapq.heappush(self._queue, entry)
        self._kept[key] = _Kept(size_bytes, load_s)
        self._total_bytes += size_bytes
        self._fixed_bytes += size_bytes if self._is_fixed(key) else 0
        self.use(key, tenant_id)
        return evicted

    def limit(self, max_bytes: int, policy: EvictionPolicy) -> list[str]:
        """Keep within other limits from now on: what goes for that, which is none of what is pinned or referred to."""
        old = sorted(self._kept.items(), key=lambda item: item[1].priority)
        self.max_bytes, self._order, self._queue = max_bytes, EvictionOrder(policy), []
        for key, storage in old:
            storage.uses += 1
            self._queue_up(key, storage)
        evicted = []
        for key, _ in old:
            if self._total_bytes <= max_bytes:
                break
            if not self._is_fixed(key):
                self.remove(key)
                evicted.append(key)
        return evicted

    def remove(self, key: str) -> bool:
        """Forget it, pinned, read or neither. False if it was not here."""
        storage = self._kept.get(key)
        if storage is None:
            return False
        self._total_bytes -= storage.size_bytes
        self._fixed_bytes -= storage.size_bytes if self._is_fixed(key) else 0
        del self._kept[key]
        self._shares.remove(key)
        return True

    def pin(self, keys: Iterable[str]) -> None:
        """Pin exactly these, whether they are here already or come later."""
        before, self._pinned = self._pinned, frozenset(keys)
        for key in before ^ self._pinned:
            storage = self._kept.get(key)
            if storage is not None and not storage.num_refs:
                self._fixed_bytes += storage.size_bytes if key in self._pinned else -storage.size_bytes

    @property
    def pinned_bytes(self) -> int:
        return sum(self._kept[key].size_bytes for key in self._pinned if key in self._kept)

    def ref(self, key: str) -> None:
        """Somebody reads it: it stays until `unref`."""
        storage = self._kept[key]
        self._fixed_bytes += 0 if self._is_fixed(key) else storage.size_bytes
        storage.num_refs += 1

    def unref(self, key: str) -> None:
        """Nothing happens if it was removed while it was read."""
        storage = self._kept.get(key)
        if storage is not None:
            assert storage.num_refs > 0
            storage.num_refs -= 1
            self._fixed_bytes -= 0 if self._is_fixed(key) else storage.size_bytes

    def _is_fixed(self, key: str) -> bool:
        return self._kept[key].num_refs > 0 or key in self._pinned
