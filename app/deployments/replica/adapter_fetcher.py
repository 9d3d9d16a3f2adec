"""The weights of adapters, from the store through shared memory.

In: references to registered adapters. Out: adapters whose arrays are views of Ray's object store: nothing is copied.
Memory that is lost (its owner died, it was evicted) is asked for again. A store that is away is waited for: its process
is back within seconds, and after the loss of its node within half a minute, which is how long Ray takes to notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.deployments.rpc.background_tasks import backoff_s
from app.deployments.rpc.named_actor import get_object
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.sandbox.packing import unpack_adapter
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: A store that is away is asked again after so long, for so long.
AGAIN_AFTER_S = 1.0
STORE_WAIT_S = 60.0


#: Between two questions for an adapter that is being read. The longest is well below `store.ABANDON_S`.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0


async def fetch_packed(store: StoreService[SharedAdapter], ref: AdapterRef) -> SharedAdapter:
    """The packed adapter. Raises what `StoreService.fetch` raises.

    No call waits in the store for an adapter to be read, since calls that wait would keep others out: the store is
    asked again and again. When this is cancelled the questions stop, and so does reading.
    """
    pauses_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, factor=1.5)
    packed = await store.fetch(ref)
    while packed is None:
        await asyncio.sleep(next(pauses_s))
        packed = await store.fetch(ref, again=True)
    return packed


class AdapterFetcher:
    """Fetches from the store; it remembers nothing."""

    def __init__(
        self,
        store: StoreService[SharedAdapter],
        clock: Callable[[], float],
        *,
        again_after_s: float = AGAIN_AFTER_S,
        wait_s: float = STORE_WAIT_S,
    ) -> None:
        """`clock` gives seconds and never goes back."""
        self._store = store
        self._clock = clock
        self._again_after_s = again_after_s
        self._wait_s = wait_s

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        """The adapter. Raises NotReady if the store stays away, and what reading the adapter raises."""
        deadline_s = self._clock() + self._wait_s
        is_lost = False
        while True:
            try:
                if is_lost:
                    await self._store.invalidate(ref.digest)
                return await self._fetch_once(ref)
            except ActorUnavailable as error:
                if self._clock() >= deadline_s:
                    raise NotReady(
                        f"adapter {ref.name!r} cannot be had: the adapter store has been away for {self._wait_s:g} s; "
                        "ask again",
                        retry_after_s=2,
                    ) from error
                logger.info("adapter %s: asking the store again: %s", ref.name, error)
                is_lost = True
            await asyncio.sleep(self._again_after_s)

    async def _fetch_once(self, ref: AdapterRef) -> LoraAdapter:
        shared = await fetch_packed(self._store, ref)
        arrays = [await get_object(array) for array in shared.arrays]
        return unpack_adapter(shared.header, arrays)
