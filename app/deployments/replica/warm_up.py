"""Which adapters a new replica holds before it is called ready, and how they come to its device.

In: an engine that runs, and what is registered. Out: the engine with what is pinned, and then what was used most. Rule:
an adapter that cannot be had, or that this engine cannot hold (its settings may have been lowered), is left out, with
the reason in the log: its requests will ask for it, or `PinController`. The same goes for all of them when the registry
does not answer: the base model is served without it.
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
from app.engine.errors import AdapterError, NotReady
from app.engine.interface import RunningEngine
from app.engine.pools.adapter_pool import rows_of

logger = logging.getLogger(__name__)

#: How long a new replica waits for the sources of pinned adapters and of the hot set.
WARM_TIMEOUT_S = 60.0
#: How long it waits for the registry to say what those are, and how long it leaves one alone that was away.
REGISTRY_TIMEOUT_S, REGISTRY_AWAY_S = 30.0, 0.5


#: (adapter, bytes that were written to the device for it): told of every adapter that is brought.
CountLoad = Callable[[AdapterRef, int], None]


class WarmUp:
    """Fills one engine's device. `timeout_s` is how long it waits for the sources of adapters."""

    def __init__(
        self,
        engine: RunningEngine,
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
        """Pin what is pinned; returns the adapters that were read, the hottest first. Raises EngineFailure."""
        self._engine.pin_adapters(pins.digests)
        read = await self._read(await self._entries(pins))
        for are_pinned in (True, False):
            part = [(ref, adapter) for ref, adapter in read if (ref.digest in pins.digests) is are_pinned]
            for ref, refusal in await bring_adapters(self._engine, part, self._count_load):
                logger.warning("adapter %s is not on the device: %s; starting without it", ref.name, refusal)
        return [adapter for _, adapter in read]

    async def _entries(self, pins: Pins) -> list[CatalogEntry]:
        max_adapters = self._config.max_loras - 1
        hot: list[CatalogEntry] = []
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                hot = await self._store.hot(max_adapters)
        except Exception as error:  # whatever is wrong with the registry, the base model can be served
            reason = f"{type(error).__name__}: {error}"
            logger.warning("nobody knows what was used last (%s); starting without it", reason)
        return hottest_that_fit(
            [*pins.entries, *(entry for entry in hot if entry.ref.digest not in pins.digests)],
            num_adapters=max_adapters,
            num_rank_rows=self._engine.stats().num_rank_rows,
            rank_alignment=self._config.rank_alignment,
            extra_bytes=self._config.extra_weights_bytes,
        )

    async def _read(self, entries: Sequence[CatalogEntry]) -> list[tuple[AdapterRef, LoraAdapter]]:
        """All at once; those that are not there in time are given up."""
        if not entries:
            return []
        fetches = [asyncio.create_task(self._adapters.fetch(entry.ref)) for entry in entries]
        await asyncio.wait(fetches, timeout=self._timeout_s)
        read: list[tuple[AdapterRef, LoraAdapter]] = []
        for entry, fetch in zip(entries, fetches, strict=True):
            if not fetch.done():
                fetch.cancel()
                logger.warning("adapter %s was not read within %g s; starting without it", entry.name, self._timeout_s)
            elif unread := fetch.exception():
                logger.warning("adapter %s cannot be read: %s", entry.name, unread)
            else:
                read.append((entry.ref, fetch.result()))
        return read


async def first_pins(store: StoreService[SharedAdapter], pinned: LongPollValue[Pins], replica_id: str) -> None:
    """Let `pinned` have what is pinned, or leave it empty where the registry does not say so in time."""
    reason: object = "no answer"
    try:
        async with asyncio.timeout(REGISTRY_TIMEOUT_S):
            while True:
                try:
                    news = await store.watch_pins(None, replica_id, WATCH_TIMEOUT_S)
                except NotReady as error:  # it restarts, or its database does
                    reason = error
                    await asyncio.sleep(REGISTRY_AWAY_S)
                    continue
                assert news is not None, "there is always news for whoever holds nothing"
                pinned.take(*news)
                return
    except TimeoutError:
        pass
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    logger.warning("nobody knows what is pinned (%s); starting without it", reason)


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
    engine: RunningEngine, adapters: Sequence[tuple[AdapterRef, LoraAdapter]], count_load: CountLoad | None = None
) -> list[tuple[AdapterRef, Exception]]:
    """Make adapters resident, the hottest first in `adapters` and last to be evicted.

    Returns those that cannot be held here (AdapterError, NotReady) and why. Raises EngineFailure.
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
