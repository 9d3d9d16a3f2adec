"""Which part of the traffic operators expect for each adapter.

In: registered adapters with their traffic weights, as they come, change and go. Out: the shares that placement plans
with. A share is an adapter's weight over the sum of all weights; the usual weight is 1, and only adapters with more
have a share. The sum changes with every adapter, so shares are told anew only when it has changed by a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from app.deployments.registry.entries import CatalogEntry
from app.deployments.registry.view import Entry, Key

#: Digest -> part of the traffic, of adapters whose weight is over 1.
Shares = Mapping[str, float]

#: Shares are told anew when the sum of all weights has changed by this factor.
_TELL_FACTOR = 1.1


class ShareBook:
    """Keeps `value` equal to the shares of the registry, within `_TELL_FACTOR`; one event loop."""

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._usual: set[Key] = set()  # of weight 1
        self._weighted: dict[Key, CatalogEntry] = {}
        for entry in entries:
            self._place((entry.tenant_id, entry.name), entry)
        self._told_total = self._total()
        self.value = self._shares()

    def apply(self, key: Key, entry: Entry | None) -> bool:
        """Take over a change of one name (None: it is gone); whether `value` is another now."""
        was_weighted = self._weighted.pop(key, None) is not None
        self._usual.discard(key)
        if isinstance(entry, CatalogEntry):
            self._place(key, entry)
        total = self._total()
        is_told = self._told_total / _TELL_FACTOR <= total <= self._told_total * _TELL_FACTOR
        if not was_weighted and key not in self._weighted and (is_told or not self.value):
            return False
        self._told_total = total
        before, self.value = self.value, self._shares()
        return self.value != before

    def _place(self, key: Key, entry: CatalogEntry) -> None:
        if entry.traffic_weight != 1.0:
            self._weighted[key] = entry
        else:
            self._usual.add(key)

    def _total(self) -> float:
        return len(self._usual) + math.fsum(entry.traffic_weight for entry in self._weighted.values())

    def _shares(self) -> Shares:
        shares: dict[str, float] = {}
        for entry in self._weighted.values():
            if entry.traffic_weight > 1.0:
                shares[entry.ref.digest] = shares.get(entry.ref.digest, 0.0) + entry.traffic_weight / self._told_total
        return shares
