"""Pins: which adapters operators have pinned, and how many may be pinned.

A pinned adapter is on every replica's device, in host memory, and on disk if it came over a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from app.config import AppConfig
from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import CatalogEntry
from app.engine.errors import AdapterTooLarge
from app.engine.pools.adapter_pool import rows_of
from app.engine.wire_format import message


@message
@dataclass(frozen=True, slots=True)
class Pins:
    """The pinned adapters: each digest once, highest traffic weight first."""

    entries: tuple[CatalogEntry, ...] = ()

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(entry.ref.digest for entry in self.entries)


class PinTable:
    """Keeps `value` equal to the registry's pins; one event loop."""

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._pinned = {(entry.tenant_id, entry.name): entry for entry in entries if entry.pinned}
        self.value = self._pins()

    def apply(self, key: Key, entry: Entry | None) -> bool:
        """Apply a change of one name (None: removed); returns whether `value` has changed."""
        before = self._pinned.pop(key, None)
        if isinstance(entry, CatalogEntry) and entry.pinned:
            self._pinned[key] = entry
        elif before is None:
            return False
        old, self.value = self.value, self._pins()
        return self.value != old

    def _pins(self) -> Pins:
        by_digest: dict[str, CatalogEntry] = {}
        for _, entry in sorted(self._pinned.items(), key=lambda item: (-item[1].traffic_weight, item[0])):
            by_digest.setdefault(entry.ref.digest, entry)
        return Pins(tuple(by_digest.values()))


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The largest adapter that an otherwise empty engine can hold. The default has no limit."""

    rank: float = math.inf
    extra_bytes: float = math.inf

    @classmethod
    def of(cls, config: AppConfig) -> EngineCapacity:
        engine = config.engine
        return cls(engine.max_rank, engine.extra_weights_bytes)

    def check(self, name: str, rank: int, extra_bytes: int) -> None:
        """Raise AdapterTooLarge if no engine of the service could ever hold the adapter."""
        if rank > self.rank:
            raise AdapterTooLarge(
                f"adapter {name!r} has rank {rank} and an engine holds at most rank {self.rank}; "
                "raise engine.lora_pool_rows (engine.vllm.max_lora_rank), or train at a lower rank"
            )
        if extra_bytes > self.extra_bytes:
            raise AdapterTooLarge(
                f"adapter {name!r} takes {extra_bytes} bytes beside its rank rows (DoRA, biases, norms, whole modules, "
                f"token rows, experts) and an engine holds at most {self.extra_bytes}; raise "
                "engine.extra_weights_bytes, or train less of it"
            )


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Limits for all pinned adapters together, and for one adapter `alone`. The default has none.

    Runs of rank rows are multiples of `rank_alignment`.
    """

    rank_rows: float = math.inf
    adapter_slots: float = math.inf
    extra_bytes: float = math.inf
    host_bytes: float = math.inf
    rank_alignment: int = 8
    alone: EngineCapacity = EngineCapacity()

    @classmethod
    def of(cls, config: AppConfig) -> PinLimits:
        share, engine = config.adapters.max_pinned_fraction, config.engine
        return cls(
            math.floor(share * engine.lora_pool_rows),
            math.floor(share * (engine.max_loras - 1)),
            math.floor(share * engine.extra_weights_bytes),
            math.floor(share * config.adapters.host_cache_bytes),
            engine.rank_alignment,
            EngineCapacity.of(config),
        )

    def check(self, name: str, pinned: Iterable[CatalogEntry]) -> None:
        """Raise AdapterTooLarge if these adapters cannot all be pinned; `name` is the one that was requested."""
        entries = {entry.ref.digest: entry for entry in pinned}.values()
        num_rows = sum(rows_of(entry.max_rank, self.rank_alignment) for entry in entries)
        for needed, limit, what, setting in (
            (num_rows, self.rank_rows, "rank rows", "lora_pool_rows"),
            (len(entries), self.adapter_slots, "adapter slots", "max_loras"),
            (sum(entry.extra_bytes for entry in entries), self.extra_bytes, "bytes", "extra_weights_bytes"),
            (sum(entry.size_bytes for entry in entries), self.host_bytes, "bytes of host memory", "host_cache_bytes"),
        ):
            if needed > limit:
                place = "adapters" if setting == "host_cache_bytes" else "engine"
                raise AdapterTooLarge(
                    f"adapter {name!r} cannot be pinned: {len(entries)} pinned adapters would take {needed} {what} and "
                    f"may take {limit}; unpin another, or raise {place}.{setting} or adapters.max_pinned_fraction"
                )
