"""Cleanup of adapters that the registry no longer has but this replica still holds.

Their unload did not reach this replica, or their name has new contents. Only digests that the registry knows to be gone
are freed, once their last sequence has ended; a registry that is down, or another database that never knew them, frees
nothing.
"""

from __future__ import annotations

import logging

from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc.background_tasks import Tasks, repeat
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.errors import EngineFailure

logger = logging.getLogger(__name__)

#: How often the registry is queried.
CHECK_INTERVAL_S = 30.0


class OrphanedAdapters:
    """One per replica, on its event loop."""

    def __init__(self, service: EngineService, store: StoreService[SharedAdapter]) -> None:
        self._service = service
        self._store = store
        self._dropping: set[str] = set()
        self._drops = Tasks()

    async def run(self) -> None:
        """Run `check` at intervals until cancelled."""
        await repeat(self.check, CHECK_INTERVAL_S, "asking the registry which adapters are gone")

    async def check(self) -> None:
        """Start freeing adapters that are gone. Raises the registry's errors."""
        digests = self._service.cached_digests() - self._dropping
        for digest in await self._store.unreferenced_digests(sorted(digests)) if digests else ():
            self._dropping.add(digest)
            self._drops.start(self._drop(digest))

    def close(self) -> None:
        self._drops.cancel()

    async def _drop(self, digest: str) -> None:
        try:
            num_rows = await self._service.unload_adapter(digest)
            logger.info("adapter %s is gone from the registry: %d rows freed", digest[:12], num_rows)
        except EngineFailure as error:
            logger.info("no rows to free: %s", error)  # they are gone with the engine
        finally:
            self._dropping.discard(digest)
