"""A replica's pinned adapters: brought to its device before anybody asks, and kept there.

In: the adapters that are pinned now, at every change and again at intervals. Out: an engine that keeps exactly those;
the ones that are not on the device are fetched. Rule: an adapter that cannot be had delays no other. It is tried again
whenever `pin` is called, and the reason is logged once. `registry.pins.PinLimits` decides what may be pinned.
"""

from __future__ import annotations

import asyncio
import logging

from app.deployments.registry.models import CatalogEntry
from app.deployments.registry.pins import Pins
from app.deployments.replica.adapter_fetcher import AdapterFetcher
from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.long_poll_client import LongPollValue
from app.engine.interface import RunningEngine

logger = logging.getLogger(__name__)


#: How often a pinned adapter that could not be brought here is tried again.
AGAIN_AFTER_S = 5.0


class PinController:
    """One per replica, on its event loop."""

    def __init__(
        self,
        engine: RunningEngine,
        adapters: AdapterFetcher,
        service: EngineService,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._service = service
        self._pinned: frozenset[str] = frozenset()
        self._bringing: set[str] = set()
        self._tasks = Tasks()
        self._told: dict[str, str] = {}  # digest -> why it could not be brought

    async def follow(self, pinned: LongPollValue[Pins]) -> None:
        """Pin what is pinned now, at every change and again at intervals, until cancelled."""
        while True:
            pins = pinned.value
            self.pin(pins)
            if pinned.value is pins:
                await pinned.changed(AGAIN_AFTER_S)

    def pin(self, pins: Pins) -> None:
        """Keep what is pinned now, and go for what of it is not on the device."""
        if pins.digests != self._pinned:
            self._pinned = pins.digests
            self._engine.pin_adapters(self._pinned)
        self._told = {digest: reason for digest, reason in self._told.items() if digest in self._pinned}
        resident = {item.digest for item in self._engine.stats().residents}
        for entry in pins.entries:
            digest = entry.ref.digest
            if digest not in resident and digest not in self._bringing:
                self._bringing.add(digest)
                self._tasks.start(self._bring(entry))

    def close(self) -> None:
        self._tasks.cancel()

    async def _bring(self, entry: CatalogEntry) -> None:
        digest = entry.ref.digest
        try:
            adapter = await self._adapters.fetch(entry.ref)
            if digest not in self._pinned:
                return  # no longer
            written_bytes = await asyncio.wrap_future(self._engine.load_adapter(adapter, entry.ref))
            self._service.brought(adapter, entry.ref, written_bytes)
            self._told.pop(digest, None)
        except Exception as error:
            reason = str(error) or type(error).__name__
            if self._told.get(digest) != reason:
                self._told[digest] = reason
                logger.warning("pinned adapter %s is not on the device: %s", entry.name, reason)
        finally:
            self._bringing.discard(digest)
