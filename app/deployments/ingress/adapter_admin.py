"""What an ingress adds to the store's calls: it frees rows on the replicas, and knows which replica holds an adapter.

In: calls of HTTP routes and of other Ray jobs. Out: the registry's values. What needs no replica is asked of `store`
itself. An unload goes on when the client that asked for it leaves; one whose ingress ends is taken up by another.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from app.deployments.placement.messages import Residency
from app.deployments.placement.placer import Placer
from app.deployments.registry.models import CatalogEntry, RegistryJob, UnloadResult
from app.deployments.rpc.background_tasks import Tasks, repeat
from app.deployments.rpc.transport import ReplicaClient, ReplicaGone, ReplicaUnreachable
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.errors import EngineFailure, NotReady

logger = logging.getLogger(__name__)

#: How often an ingress asks for unloads that nobody sees to, and says which it does. Shorter than their `UNSEEN_S`.
TAKE_UP_INTERVAL_S = 10.0
#: How often a drain asks whether a name means the contents again: then their rows need not become free.
USED_AGAIN_INTERVAL_S = 1.0


class AdapterAdmin:
    """One per ingress. Every method raises NotReady while the store restarts, and what its counterpart raises."""

    def __init__(self, store: StoreService[SharedAdapter], replicas: ReplicaClient, placer: Placer) -> None:
        self.store = store
        self._replicas = replicas
        self._placer = placer
        self._tasks = Tasks()  # an unload goes on when the request that began it is cancelled
        self._draining: set[str] = set()  # the jobs of unloads that this ingress sees to

    async def unload(
        self, name: str, *, tenant_id: str, who: str, wait: bool = True
    ) -> tuple[RegistryJob, CatalogEntry | None]:
        """Forget a name everywhere, then free its rows once no sequence uses them, then the host's copy.

        A name that was only being loaded has no entry: its loads are cancelled.
        """
        begin = self._tasks.start(self.store.begin_unload(name, tenant_id=tenant_id, who=who))
        drain = self._tasks.start(self._drain_begun(begin))
        unload, entry = await asyncio.shield(begin)
        return await asyncio.shield(drain) if wait else unload.job, entry

    async def keep_taking_up(self) -> None:
        """`take_up` until cancelled, whatever the store does."""
        await asyncio.sleep(TAKE_UP_INTERVAL_S)  # first: a new ingress does not know the replicas yet
        await repeat(self.take_up, TAKE_UP_INTERVAL_S, "asking for unloads that nobody sees to")

    async def take_up(self) -> None:
        """Go on with unloads whose ingress has ended, and with those that could not be ended."""
        for unload in await self.store.left_unloads(tuple(self._draining)):
            self._tasks.start(self._drain(unload))

    async def close(self) -> None:
        """Leave what is not finished to other ingresses."""
        await self._tasks.close()

    async def residency(self, digest: str) -> list[Residency]:
        """Replicas whose device holds these contents, as they last said. Raises NotReady while placement is away."""
        return await self._placer.residency(digest)

    async def _drain_begun(self, begin: asyncio.Task[tuple[UnloadResult, CatalogEntry | None]]) -> RegistryJob:
        return await self._drain((await begin)[0])

    async def _drain(self, unload: UnloadResult) -> RegistryJob:
        if unload.digest is None:
            return unload.job
        self._draining.add(unload.job.id)
        try:
            if not unload.is_shared:
                await self._free(unload.digest)
            return await self.store.end_unload(unload)
        finally:
            self._draining.discard(unload.job.id)

    async def _free(self, digest: str) -> None:
        """Return when no replica has rows of these contents, or when a name means them again.

        New requests would keep them for ever, and are not told apart from those that the unload waits for.
        """
        drops = self._tasks.start(self._drop_everywhere(digest))
        while not (await asyncio.wait([drops], timeout=USED_AGAIN_INTERVAL_S))[0]:
            with suppress(NotReady):  # asked again
                if await self.store.is_used(digest):
                    return
        drops.result()

    async def _drop_everywhere(self, digest: str) -> None:
        """Where the contents are, or may come: their homes. What a replica holds beyond that it drops by itself."""
        view = self._placer.view
        replica_ids = {*view.resident_replicas(digest), *view.assigned_replicas(digest)}
        with suppress(NotReady):  # then the table is all that is known
            replica_ids.update(each.replica_id for each in await self._placer.residency(digest))
        await asyncio.gather(*(self._drop(replica_id, digest) for replica_id in sorted(replica_ids)))

    async def _drop(self, replica_id: str, digest: str) -> None:
        try:
            await self._replicas.drop_adapter(replica_id, digest)
        except (ReplicaGone, ReplicaUnreachable, EngineFailure, NotReady) as error:
            logger.info("no rows to free: %s", error)  # they go with the replica, or with its engine
