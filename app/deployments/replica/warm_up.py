"""Which adapters a new replica holds before it is called ready, and how they come to its device.

In: an engine that runs, and what is registered. Out: the engine with the adapters that were used most. Rule: an
adapter that this engine cannot hold (its settings may have been lowered) is left out, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.deployments.registry.entries import CatalogEntry
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.lora import LoraAdapter
from app.engine.errors import AdapterError, NotReady
from app.engine.interface import RunningEngine
from app.engine.pools.adapter_pool import rows_of


def hottest_that_fit(
    entries: Sequence[CatalogEntry], *, num_adapters: int, num_rank_rows: int, rank_alignment: int, extra_bytes: int
) -> list[CatalogEntry]:
    """Those of `entries`, the hottest first, that a device holds at once: each that fits beside hotter ones."""
    chosen: list[CatalogEntry] = []
    for entry in entries:
        num_rows = rows_of(entry.max_rank, rank_alignment)
        if len(chosen) < num_adapters and num_rows <= num_rank_rows and entry.extra_bytes <= extra_bytes:
            chosen.append(entry)
            num_rank_rows -= num_rows
            extra_bytes -= entry.extra_bytes
    return chosen


async def bring_adapters(
    engine: RunningEngine, adapters: Sequence[tuple[AdapterRef, LoraAdapter]]
) -> list[tuple[AdapterRef, Exception]]:
    """Make adapters resident, the hottest first in `adapters` and last to be evicted.

    Returns those that cannot be held here (AdapterError, NotReady) and why. Raises EngineFailure.
    """
    refused: list[tuple[AdapterRef, Exception]] = []
    for ref, adapter in reversed(adapters):
        try:
            await asyncio.wrap_future(engine.bring_adapter(adapter, ref))
        except (AdapterError, NotReady) as error:
            refused.append((ref, error))
    return refused
