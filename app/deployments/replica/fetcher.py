"""The weights of adapters, from the store through shared memory.

In: references to registered adapters. Out: adapters whose arrays are views of Ray's object store: nothing is copied.
Memory that is lost (its owner died, it was evicted) is asked for once more, after the time that a store needs to
restart.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from app.deployments.links.ray_calls import ActorAway, held
from app.deployments.store.shared import SharedAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.isolation.packing import unpack_adapter
from app.engine.adapters.lora import LoraAdapter
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: A store that restarts needs about two seconds; Ray queues the second call meanwhile.
AGAIN_AFTER_S = 1.0


class SharedAdapters(Protocol):
    """The part of `StoreClient` that is used here."""

    async def fetch(self, ref: AdapterRef) -> SharedAdapter: ...

    async def lost(self, digest: str) -> None: ...


class AdapterFetcher:
    """Fetches from the store; it remembers nothing."""

    def __init__(self, store: SharedAdapters, *, again_after_s: float = AGAIN_AFTER_S) -> None:
        self._store = store
        self._again_after_s = again_after_s

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        """The adapter. Raises NotReady while the store is away, and what reading the adapter raises."""
        try:
            return await self._fetch_once(ref)
        except ActorAway as error:
            logger.info("adapter %s: asking the store again: %s", ref.name, error)
        await asyncio.sleep(self._again_after_s)
        try:
            await self._store.lost(ref.digest)
            return await self._fetch_once(ref)
        except ActorAway as error:
            raise NotReady(
                f"adapter {ref.name!r} cannot be had while the adapter store restarts; ask again", retry_after_s=2
            ) from error

    async def _fetch_once(self, ref: AdapterRef) -> LoraAdapter:
        shared = await self._store.fetch(ref)
        arrays = [await held(array) for array in shared.arrays]
        return unpack_adapter(shared.header, arrays)
