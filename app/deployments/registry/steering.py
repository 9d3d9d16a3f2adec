"""What operators say about traffic: which adapters must never leave, and which get more than the usual share.

In: registered adapters with their pins and traffic weights, as they come and go. Out: a `Steering`, the same for
tiers, replicas and placement, and the verdict on whether pins fit. What is pinned is on every replica's device,
in host memory, and on disk if it came over a network. A weight is a share of the expected traffic: its part of
the sum over all adapters, 1 being the usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.config import AppConfig
from app.deployments.registry.entries import CatalogEntry
from app.deployments.registry.view import Entry, Key
from app.engine.errors import AdapterTooLarge
from app.engine.pools.adapter_pool import rows_of

#: Shares are told anew when the sum of all weights has changed by this factor.
_TELL_FACTOR = 1.1


@dataclass(frozen=True, slots=True)
class Steering:
    """`pinned`: the heaviest first, each digest once. `shares`: digest -> part of the traffic, of weights over 1."""

    pinned: tuple[CatalogEntry, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def pinned_digests(self) -> frozenset[str]:
        return frozenset(entry.ref.digest for entry in self.pinned)


@dataclass(frozen=True, slots=True)
class PinLimits:
    """What pinned adapters may take together; runs of rank rows are multiples of `rank_alignment`. The default has no
    bound."""

    rank_rows: float = math.inf
    adapter_slots: float = math.inf
    extra_bytes: float = math.inf
    host_bytes: float = math.inf
    rank_alignment: int = 8

    @classmethod
    def of(cls, config: AppConfig) -> PinLimits:
        share, engine = config.adapters.pinned_share, config.engine
        return cls(
            math.floor(share * engine.adapter_rank_rows),
            math.floor(share * (engine.max_adapter_slots - 1)),
            math.floor(share * engine.adapter_extra_bytes),
            math.floor(share * config.adapters.host_cache_bytes),
            engine.rank_alignment,
        )

    def check(self, name: str, pinned: Iterable[CatalogEntry]) -> None:
        """Raise AdapterTooLarge if these cannot all be pinned; `name` is the one that was asked for."""
        entries = {entry.ref.digest: entry for entry in pinned}.values()
        num_rows = sum(rows_of(entry.max_rank, self.rank_alignment) for entry in entries)
        for needed, limit, what, setting in (
            (num_rows, self.rank_rows, "rank rows", "adapter_rank_rows"),
            (len(entries), self.adapter_slots, "adapter slots", "max_adapter_slots"),
            (sum(entry.extra_bytes for entry in entries), self.extra_bytes, "bytes", "adapter_extra_bytes"),
            (sum(entry.size_bytes for entry in entries), self.host_bytes, "bytes of host memory", "host_cache_bytes"),
        ):
            if needed > limit:
                place = "adapters" if setting == "host_cache_bytes" else "engine"
                raise AdapterTooLarge(
                    f"adapter {name!r} cannot be pinned: {len(entries)} pinned adapters would take {needed} {what} and "
                    f"may take {limit}; unpin another, or raise {place}.{setting} or adapters.pinned_share"
                )


class Steerer:
    """Follows the registry; one event loop."""

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._usual: set[Key] = set()  # neither pinned nor of another weight than 1
        self._special: dict[Key, CatalogEntry] = {}
        self._told_total = math.nan
        for entry in entries:
            self._place((entry.tenant_id, entry.name), entry)
        self.value = self._steering()

    def apply(self, key: Key, entry: Entry | None) -> bool:
        """Take over a change; whether `value` is another now."""
        was_special = key in self._special
        self._usual.discard(key)
        self._special.pop(key, None)
        if isinstance(entry, CatalogEntry):
            self._place(key, entry)
        total = self._total()
        is_told = self._told_total / _TELL_FACTOR <= total <= self._told_total * _TELL_FACTOR
        if not was_special and key not in self._special and (is_told or not self.value.shares):
            return False
        before, self.value = self.value, self._steering()
        return self.value != before

    def _place(self, key: Key, entry: CatalogEntry) -> None:
        if entry.pinned or entry.traffic_weight != 1.0:
            self._special[key] = entry
        else:
            self._usual.add(key)

    def _total(self) -> float:
        return len(self._usual) + math.fsum(entry.traffic_weight for entry in self._special.values())

    def _steering(self) -> Steering:
        total = self._told_total = self._total()
        pinned: dict[str, CatalogEntry] = {}
        for _, entry in sorted(self._special.items(), key=lambda item: (-item[1].traffic_weight, item[0])):
            if entry.pinned:
                pinned.setdefault(entry.ref.digest, entry)
        shares: dict[str, float] = {}
        for entry in self._special.values():
            if entry.traffic_weight > 1.0:
                shares[entry.ref.digest] = shares.get(entry.ref.digest, 0.0) + entry.traffic_weight / total
        return Steering(tuple(pinned.values()), shares)
