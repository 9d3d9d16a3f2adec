"""Pinned adapters of a replica: loaded to its device before the first request, and kept there.

An adapter that cannot be loaded delays no other; it is retried whenever `pin` is called, and the reason is logged once.
`registry.pins.PinLimits` decides what may be pinned.
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
from app.engine.engine_thread import EngineThread

logger = logging.getLogger(__name__)
#: How often a pinned adapter that could not be loaded is retried.
RETRY_S = 5.0


class PinController:
    """One per replica, on its event loop."""

    def __init__(
        self,
        engine: EngineThread,
        adapters: AdapterFetcher,
        service: EngineService,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._service = service
        self._pinned: frozenset[str] = frozenset()
        self._loading: set[str] = set()
        self._tasks = Tasks()
        self._logged: dict[str, str] = {}  # digest -> the reason that was logged

    async def follow(self, pinned: LongPollValue[Pins]) -> None:
        """Call `pin` at every change and at intervals, until cancelled."""
        while True:
            pins = pinned.value
            self.pin(pins)
            if pinned.value is pins:
                await pinned.wait_for_change(RETRY_S)

    def pin(self, pins: Pins) -> None:
        """Keep these adapters, and load those that are not on the device."""
        if pins.digests != self._pinned:
            self._pinned = pins.digests
            self._engine.pin_adapters(self._pinned)
        self._logged = {digest: reason for digest, reason in self._logged.items() if digest in self._pinned}
        resident = {item.digest for item in self._engine.stats().residents}
        for entry in pins.entries:
            digest = entry.ref.digest
            if digest not in resident and digest not in self._loading:
                self._loading.add(digest)
                self._tasks.start(self._load(entry))

    def close(self) -> None:
        self._tasks.cancel()

    async def _load(self, entry: CatalogEntry) -> None:
        digest = entry.ref.digest
        try:
            adapter = await self._adapters.fetch(entry.ref)
            if digest not in self._pinned:
                return  # unpinned meanwhile
            written_bytes = await asyncio.wrap_future(self._engine.load_adapter(adapter, entry.ref))
            self._service.on_prefetched(adapter, entry.ref, written_bytes)
            self._logged.pop(digest, None)
        except Exception as error:
            reason = str(error) or type(error).__name__
            if self._logged.get(digest) != reason:
                self._logged[digest] = reason
                logger.warning("pinned adapter %s is not on the device: %s", entry.name, reason)
        finally:
            self._loading.discard(digest)
