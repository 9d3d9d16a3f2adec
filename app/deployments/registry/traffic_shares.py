"""The share of the traffic that operators expect for each adapter, for placement's planning.

A share is an adapter's weight over the sum of all weights. The default weight is 1, and only heavier adapters have a
share, if it is large enough for a second replica in the largest deployment. A change of one name updates only its own
share, unless the sum of all weights has changed by a tenth since the last update of all shares, of which there are at
most 1 / MIN_SHARE.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import CatalogEntry

#: Smaller shares are dropped: even with 1 / MIN_SHARE replicas they would mean one replica, which every adapter has.
MIN_SHARE = 0.001
#: All shares are updated when the sum of all weights has changed by this factor.
_UPDATE_FACTOR = 1.1


class TrafficShares:
    """Keeps `value`, the shares by digest, equal to the registry's within `_UPDATE_FACTOR`; one event loop."""

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._entries: dict[Key, tuple[str, float]] = {}  # key -> (digest, weight)
        self._total = 0.0
        self._weights: dict[str, float] = {}  # digest -> sum of the weights above 1 of its names
        self._heaviest: list[tuple[float, str]] = []  # (-weight, digest), sorted
        for entry in entries:
            self._replace((entry.tenant_id, entry.name), entry if entry.is_read else None)
        self._base_total = self._total
        self.value: dict[str, float] = self._shares()

    def apply(self, key: Key, entry: Entry | None) -> Mapping[str, float | None]:
        """Apply a change of one name (None: removed). Returns the shares that changed; None: no share any more."""
        touched = self._replace(key, entry if isinstance(entry, CatalogEntry) and entry.is_read else None)
        if self._base_total / _UPDATE_FACTOR <= self._total <= self._base_total * _UPDATE_FACTOR:
            after = {digest: share for digest in touched if (share := self._share(digest)) is not None}
            before = {digest: self.value[digest] for digest in touched if digest in self.value}
        else:
            self._base_total = self._total
            after, before = self._shares(), self.value
        changes: dict[str, float | None] = dict.fromkeys(before.keys() - after.keys())
        changes |= {digest: share for digest, share in after.items() if before.get(digest) != share}
        for digest, new in changes.items():
            if new is None:
                del self.value[digest]
            else:
                self.value[digest] = new
        return changes

    def _replace(self, key: Key, entry: CatalogEntry | None) -> set[str]:
        """Returns the digests whose weight has changed."""
        touched = set()
        if (old := self._entries.pop(key, None)) is not None:
            self._total -= old[1]
            touched |= self._add(old[0], -old[1]) if old[1] > 1.0 else set()
        if entry is not None:
            digest, weight = self._entries[key] = entry.ref.digest, entry.traffic_weight
            self._total += weight
            touched |= self._add(digest, weight) if weight > 1.0 else set()
        if not self._entries:
            self._total = 0.0  # drop the rounding error
        return touched

    def _add(self, digest: str, weight: float) -> set[str]:
        before = self._weights.pop(digest, 0.0)
        if before:
            del self._heaviest[bisect_left(self._heaviest, (-before, digest))]
        after = before + weight
        if after > 1.0:  # a sum of weights over 1; anything less is a rounding error
            self._weights[digest] = after
            insort(self._heaviest, (-after, digest))
        return {digest}

    def _share(self, digest: str) -> float | None:
        share = self._weights.get(digest, 0.0) / self._base_total if self._base_total else 0.0
        return share if share >= MIN_SHARE else None

    def _shares(self) -> dict[str, float]:
        shares: dict[str, float] = {}
        for _, digest in self._heaviest:
            share = self._share(digest)
            if share is None:
                break
            shares[digest] = share
        return shares
