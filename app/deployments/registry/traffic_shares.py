"""Which part of the traffic operators expect for each adapter.

In: registered adapters with their traffic weights, as they come, change and go. Out: the changes of the shares that
placement plans with. A share is an adapter's weight over the sum of all weights; the usual weight is 1, and only
adapters with more have a share, if it is large enough for a second home in the largest fleet. Rule: a change of one
name costs no more than its own share, except when the sum of all weights has changed by a tenth: then all shares, which
are at most 1 / MIN_SHARE, are told anew.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import CatalogEntry

#: A smaller share is none: with so many replicas as its inverse it would give an adapter one home, as it has anyway.
MIN_SHARE = 0.001
#: Shares are told anew when the sum of all weights has changed by this factor.
_TELL_FACTOR = 1.1


class TrafficShares:
    """Keeps `value`, the shares by digest, equal to those of the registry within `_TELL_FACTOR`; one event loop."""

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._entries: dict[Key, tuple[str, float]] = {}  # (digest, weight)
        self._total = 0.0
        self._weights: dict[str, float] = {}  # by digest, of names with more than the usual weight
        self._heaviest: list[tuple[float, str]] = []  # (-weight, digest) of those, in order
        for entry in entries:
            self._replace((entry.tenant_id, entry.name), entry if entry.is_read else None)
        self._told_total = self._total
        self.value: dict[str, float] = self._shares()

    def apply(self, key: Key, entry: Entry | None) -> Mapping[str, float | None]:
        """Take over a change of one name (None: it is gone). Returns the shares that are others now; None: no share."""
        touched = self._replace(key, entry if isinstance(entry, CatalogEntry) and entry.is_read else None)
        if self._told_total / _TELL_FACTOR <= self._total <= self._told_total * _TELL_FACTOR:
            after = {digest: share for digest in touched if (share := self._share(digest)) is not None}
            before = {digest: self.value[digest] for digest in touched if digest in self.value}
        else:
            self._told_total = self._total
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
        """Returns the digests whose weight is another now."""
        touched = set()
        if (old := self._entries.pop(key, None)) is not None:
            self._total -= old[1]
            touched |= self._add(old[0], -old[1]) if old[1] > 1.0 else set()
        if entry is not None:
            digest, weight = self._entries[key] = entry.ref.digest, entry.traffic_weight
            self._total += weight
            touched |= self._add(digest, weight) if weight > 1.0 else set()
        if not self._entries:
            self._total = 0.0  # and not what rounding has left
        return touched

    def _add(self, digest: str, weight: float) -> set[str]:
        before = self._weights.pop(digest, 0.0)
        if before:
            del self._heaviest[bisect_left(self._heaviest, (-before, digest))]
        after = before + weight
        if after > 1.0:  # a sum of weights over 1; less is what rounding has left of none
            self._weights[digest] = after
            insort(self._heaviest, (-after, digest))
        return {digest}

    def _share(self, digest: str) -> float | None:
        share = self._weights.get(digest, 0.0) / self._told_total if self._told_total else 0.0
        return share if share >= MIN_SHARE else None

    def _shares(self) -> dict[str, float]:
        shares: dict[str, float] = {}
        for _, digest in self._heaviest:
            share = self._share(digest)
            if share is None:
                break
            shares[digest] = share
        return shares
