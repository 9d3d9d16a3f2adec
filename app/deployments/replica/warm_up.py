"""Warm-up of a new replica: pinned adapters and then the most recently used are loaded before it is ready.

An adapter that cannot be loaded, or does not fit this engine (its settings may have been lowered), is skipped with a
log line; its requests or `PinController` load it later. If the registry does not answer, the replica starts with the
base model only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from app.deployments.registry.models import CatalogEntry
from app.deployments.registry.pins import Pins
from app.deployments.replica.adapter_fetcher import AdapterFetcher
from app.deployments.rpc.long_poll_client import WATCH_TIMEOUT_S, LongPollValue
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.config import EngineConfig
from app.engine.engine_thread import EngineThread
from app.engine.errors import AdapterError, NotReady
from app.engine.pools.adapter_pool import rows_of

logger = logging.getLogger(__name__)

#: How long a new replica waits for adapters to load.
WARM_TIMEOUT_S = 60.0
#: How long it waits for the registry's lists, and the retry interval while the registry is down.
REGISTRY_TIMEOUT_S, REGISTRY_RETRY_S = 30.0, 0.5

#: (adapter, bytes written to the device), called for every loaded adapter.
CountLoad = Callable[[AdapterRef, int], None]


class WarmUp:
    """Fills one engine's device. `timeout_s` is how long it waits for adapters to load."""

    def __init__(
        self,
        engine: EngineThread,
        config: EngineConfig,
        adapters: AdapterFetcher,
        store: StoreService[SharedAdapter],
        *,
        count_load: CountLoad | None = None,
        timeout_s: float = WARM_TIMEOUT_S,
    ) -> None:
        self._count_load = count_load
        self._engine = engine
        self._config = config
        self._adapters = adapters
        self._store = store
        self._timeout_s = timeout_s

    async def run(self, pins: Pins) -> list[LoraAdapter]:
        """Pin adapters and load the hottest; returns those that were fetched, the hottest first. Raises
        EngineFailure."""
        self._engine.pin_adapters(pins.digests)
        read = await self._fetch(await self._entries(pins))
        for are_pinned in (True, False):
            part = [(ref, adapter) for ref, adapter in read if (ref.digest in pins.digests) is are_pinned]
            for ref, refusal in await load_adapters(self._engine, part, self._count_load):
                logger.warning("cannot load adapter %s to the device: %s; starting without it", ref.name, refusal)
        return [adapter for _, adapter in read]

    async def _entries(self, pins: Pins) -> list[CatalogEntry]:
        max_adapters = self._config.max_loras - 1
        hot: list[CatalogEntry] = []
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                hot = await self._store.hot(max_adapters)
        except Exception as error:  # the base model can be served without the registry
            reason = f"{type(error).__name__}: {error}"
            logger.warning("the registry does not list the hot set (%s); starting without it", reason)
        return hottest_that_fit(
            [*pins.entries, *(entry for entry in hot if entry.ref.digest not in pins.digests)],
            num_adapters=max_adapters,
            num_rank_rows=self._engine.stats().num_rank_rows,
            rank_alignment=self._config.rank_alignment,
            extra_bytes=self._config.extra_weights_bytes,
        )

    async def _fetch(self, entries: Sequence[CatalogEntry]) -> list[tuple[AdapterRef, LoraAdapter]]:
        """Fetch all at once; those not fetched within `timeout_s` are skipped."""
        if not entries:
            return []
        fetches = [asyncio.create_task(self._adapters.fetch(entry.ref)) for entry in entries]
        await asyncio.wait(fetches, timeout=self._timeout_s)
        read: list[tuple[AdapterRef, LoraAdapter]] = []
        for entry, fetch in zip(entries, fetches, strict=True):
            if not fetch.done():
                fetch.cancel()
                logger.warning("adapter %s not fetched within %g s; starting without it", entry.name, self._timeout_s)
            elif error := fetch.exception():
                logger.warning("cannot fetch adapter %s: %s", entry.name, error)
            else:
                read.append((entry.ref, fetch.result()))
        return read


async def wait_for_pins(store: StoreService[SharedAdapter], pinned: LongPollValue[Pins], replica_id: str) -> None:
    """Fill `pinned` from the registry; leave it empty if the registry does not answer in time."""
    reason: object = "no answer"
    try:
        async with asyncio.timeout(REGISTRY_TIMEOUT_S):
            while True:
                try:
                    update = await store.watch_pins(None, replica_id, WATCH_TIMEOUT_S)
                except NotReady as error:  # the store or its database restarts
                    reason = error
                    await asyncio.sleep(REGISTRY_RETRY_S)
                    continue
                assert update is not None, "a watcher without a version always gets the value"
                pinned.apply(*update)
                return
    except TimeoutError:
        pass
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    logger.warning("the registry does not list pinned adapters (%s); starting without them", reason)


def hottest_that_fit(
    entries: Sequence[CatalogEntry], *, num_adapters: int, num_rank_rows: int, rank_alignment: int, extra_bytes: int
) -> list[CatalogEntry]:
    """The adapters of `entries` (hottest first) that fit on a device together; each must fit beside hotter ones."""
    chosen: list[CatalogEntry] = []
    for entry in entries:
        num_rows = rows_of(entry.max_rank, rank_alignment)
        if len(chosen) < num_adapters and num_rows <= num_rank_rows and entry.extra_bytes <= extra_bytes:
            chosen.append(entry)
            num_rank_rows -= num_rows
            extra_bytes -= entry.extra_bytes
    return chosen


async def load_adapters(
    engine: EngineThread, adapters: Sequence[tuple[AdapterRef, LoraAdapter]], count_load: CountLoad | None = None
) -> list[tuple[AdapterRef, Exception]]:
    """Make `adapters` resident; they are given hottest first and loaded in reverse, so the hottest is evicted last.

    Returns those that cannot be loaded (AdapterError, NotReady) and why. Raises EngineFailure.
    """
    refused: list[tuple[AdapterRef, Exception]] = []
    for ref, adapter in reversed(adapters):
        try:
            written_bytes = await asyncio.wrap_future(engine.load_adapter(adapter, ref))
        except (AdapterError, NotReady) as error:
            refused.append((ref, error))
        else:
            if count_load is not None:
                count_load(ref, written_bytes)
    return refused
