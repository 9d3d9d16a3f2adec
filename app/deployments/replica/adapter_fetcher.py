"""Fetching of adapters' weights from the store through shared memory.

Arrays are views of Ray's object store; nothing is copied. Objects that are lost (their owner died, or they were
evicted) are fetched again. A store that is down is waited for: its process restarts within seconds, and after the loss
of its node within half a minute, which is how long Ray takes to notice.
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

#: Retry interval while the store is down, and when to give up.
RETRY_S = 1.0
STORE_WAIT_S = 60.0
#: Polling intervals while the store loads an adapter. The longest is well below `store.reader_pool.ABANDON_S`.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0


async def fetch_packed(store: StoreService[SharedAdapter], ref: AdapterRef) -> SharedAdapter:
    """The packed adapter. Raises the errors of `StoreService.fetch`.

    The store is polled, because calls that wait in it would keep others out. Cancelling stops the polling, and then the
    store stops loading.
    """
    pauses_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, factor=1.5)
    packed = await store.fetch(ref)
    while packed is None:
        await asyncio.sleep(next(pauses_s))
        packed = await store.fetch(ref, again=True)
    return packed


class AdapterFetcher:
    """Fetches from the store, without a cache."""

    def __init__(
        self,
        store: StoreService[SharedAdapter],
        clock: Callable[[], float],
        *,
        retry_s: float = RETRY_S,
        wait_s: float = STORE_WAIT_S,
    ) -> None:
        """`clock` gives seconds that never go back."""
        self._store = store
        self._clock = clock
        self._retry_s = retry_s
        self._wait_s = wait_s

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        """The adapter. Raises NotReady if the store stays down, and the errors of loading."""
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
                        f"cannot fetch adapter {ref.name!r}: the adapter store has been down for {self._wait_s:g} s; "
                        "send the request again later",
                        retry_after_s=2,
                    ) from error
                logger.info("fetching adapter %s again: %s", ref.name, error)
                is_lost = True
            await asyncio.sleep(self._retry_s)

    async def _fetch_once(self, ref: AdapterRef) -> LoraAdapter:
        shared = await fetch_packed(self._store, ref)
        arrays = [await get_object(array) for array in shared.arrays]
        return unpack_adapter(shared.header, arrays)
