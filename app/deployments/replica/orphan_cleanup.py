"""A replica frees what the registry no longer has, though nobody told it.

In: the digests of the adapters that a replica holds. Out: freed rows of those that no name means any more: their unload
did not reach this replica, because it was cut off or came late, or their name means other contents now. Rule: only what
the registry knows to be gone is freed, once its last sequence has ended; a registry that is away, or another database
that has never heard of the contents, frees nothing.
"""

from __future__ import annotations

import asyncio
import logging

from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc.background_tasks import Tasks, repeat
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.errors import EngineFailure

logger = logging.getLogger(__name__)

#: How often the registry is asked.
LOOK_INTERVAL_S = 30.0


class OrphanedAdapters:
    """One per replica, on its event loop."""

    def __init__(self, service: EngineService, store: StoreService[SharedAdapter]) -> None:
        self._service = service
        self._store = store
        self._dropping: set[str] = set()
        self._drops = Tasks()

    async def run(self) -> None:
        """Look at intervals until cancelled, whatever the registry does."""
        await asyncio.sleep(LOOK_INTERVAL_S)
        await repeat(self.look, LOOK_INTERVAL_S, "asking the registry which adapters are gone")

    async def look(self) -> None:
        """Begin to free what is gone. Raises what asking raises."""
        held = self._service.held() - self._dropping
        for digest in await self._store.gone(sorted(held)) if held else ():
            self._dropping.add(digest)
            self._drops.start(self._drop(digest))

    def close(self) -> None:
        self._drops.cancel()

    async def _drop(self, digest: str) -> None:
        try:
            num_rows = await self._service.unload_adapter(digest)
            logger.info("adapter %s is gone from the registry: %d rows freed", digest[:12], num_rows)
        except EngineFailure as error:
            logger.info("no rows to free: %s", error)  # they go with the engine
        finally:
            self._dropping.discard(digest)
