"""Fetching of adapters' weights from the store through shared memory, and those that stay mapped.

Arrays are views of Ray's object store; nothing is copied. Objects that are lost (their owner died, or they were
evicted) are fetched again. A store that is down is waited for: its process restarts within seconds, and after the loss
of its node within half a minute, which is how long Ray takes to notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Set

from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.deployments.rpc.background_tasks import Tasks, backoff_s
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
#: Bytes of adapters mapped in this process. They are views of shared memory, which stays allocated meanwhile.
MAX_MAPPED_BYTES = 256 << 20


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


class MappedAdapters:
    """Adapters mapped in this process: those used last, up to `MAX_MAPPED_BYTES`. One event loop."""

    def __init__(self, fetcher: AdapterFetcher) -> None:
        self._fetcher = fetcher
        self._mapped: OrderedDict[str, LoraAdapter] = OrderedDict()  # by digest, least recently used first
        self._fetching: dict[AdapterRef, asyncio.Task[LoraAdapter]] = {}
        self._tasks = Tasks()

    @property
    def digests(self) -> Set[str]:
        return self._mapped.keys()

    def get(self, digest: str) -> LoraAdapter | None:
        """A mapped adapter, for a request that uses it."""
        if digest in self._mapped:
            self._mapped.move_to_end(digest)
        return self._mapped.get(digest)

    def add(self, adapter: LoraAdapter) -> None:
        """Keep an adapter mapped; evicts the least recently used."""
        self._mapped[adapter.card.digest] = adapter
        self._mapped.move_to_end(adapter.card.digest)
        while len(self._mapped) > 1 and sum(a.card.size_bytes for a in self._mapped.values()) > MAX_MAPPED_BYTES:
            self._mapped.popitem(last=False)

    def remove(self, digest: str) -> None:
        """Unmap an adapter; no effect on others."""
        self._mapped.pop(digest, None)

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        """Fetch and map an adapter. Raises what fetching raises.

        One fetch per name and tenant at a time: another tenant's source may fail while this one works, and errors have
        the name.
        """
        task = self._fetching.get(ref)
        if task is None:
            task = self._fetching[ref] = self._tasks.start(self._fetch_and_map(ref))
        return await asyncio.shield(task)

    async def _fetch_and_map(self, ref: AdapterRef) -> LoraAdapter:
        try:
            adapter = await self._fetcher.fetch(ref)
        finally:
            del self._fetching[ref]
        self.add(adapter)
        return adapter
