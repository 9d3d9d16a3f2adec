"""Management of adapters that involves replicas: unloading frees their rows on every device.

Calls that need no replica go to `store` directly. An unload continues when its client disconnects; if its ingress dies,
another ingress resumes it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from app.deployments.placement.placer import Placer
from app.deployments.registry.models import CatalogEntry, RegistryJob, UnloadResult
from app.deployments.rpc.background_tasks import Tasks, repeat
from app.deployments.rpc.transport import ReplicaClient, ReplicaGone, ReplicaUnreachable
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.errors import EngineFailure, NotReady

logger = logging.getLogger(__name__)

#: How often an ingress looks for orphaned unloads and renews its own; less than `unload_jobs.ORPHAN_TIMEOUT_S`.
RESUME_INTERVAL_S = 10.0
#: How often an unload checks whether a name refers to the contents again; then their rows stay.
STILL_USED_INTERVAL_S = 1.0


class AdapterAdmin:
    """One per ingress. Every method raises NotReady while the store restarts, besides the store's own errors."""

    def __init__(self, store: StoreService[SharedAdapter], replicas: ReplicaClient, placer: Placer) -> None:
        self.store = store
        self._replicas = replicas
        self._placer = placer
        self._tasks = Tasks()  # outlive the request that started them
        self._draining: set[str] = set()  # ids of the unload jobs that run here

    async def unload(
        self, name: str, *, tenant_id: str, who: str, wait: bool = True
    ) -> tuple[RegistryJob, CatalogEntry | None]:
        """Remove a name everywhere, free the rows once no sequence uses them, then the host's copy.

        Pending loads of the name are cancelled; a name that was only being loaded has no entry.
        """
        begin = self._tasks.start(self.store.begin_unload(name, tenant_id=tenant_id, who=who))
        drain = self._tasks.start(self._drain_after(begin))
        unload, entry = await asyncio.shield(begin)
        return await asyncio.shield(drain) if wait else unload.job, entry

    def discard_upload(self, upload_id: str) -> None:
        """Remove an upload that will not be completed, after this call."""
        self._tasks.start(self.store.discard_upload(upload_id))

    async def keep_resuming_unloads(self) -> None:
        """Run `resume_unloads` at intervals until cancelled; not at once: a new ingress does not know the replicas."""
        await repeat(self.resume_unloads, RESUME_INTERVAL_S, "looking for orphaned unloads")

    async def resume_unloads(self) -> None:
        """Continue unloads whose ingress has died, and those that could not be finished."""
        for unload in await self.store.orphaned_unloads(tuple(self._draining)):
            self._tasks.start(self._drain(unload))

    async def close(self) -> None:
        """Stop; other ingresses resume unfinished unloads."""
        await self._tasks.close()

    async def _drain_after(self, begin: asyncio.Task[tuple[UnloadResult, CatalogEntry | None]]) -> RegistryJob:
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
        """Return when no replica has rows of these contents, or a name refers to them again.

        In the latter case new requests would keep the rows in use forever; they cannot be distinguished from the old
        ones.
        """
        drops = self._tasks.start(self._drop_everywhere(digest))
        while not (await asyncio.wait([drops], timeout=STILL_USED_INTERVAL_S))[0]:
            with suppress(NotReady):  # retried in the next turn
                if await self.store.is_used(digest):
                    return
        drops.result()

    async def _drop_everywhere(self, digest: str) -> None:
        """Drop the contents on replicas that hold them and on their assigned replicas. Others drop them by themselves
        (`OrphanedAdapters`)."""
        view = self._placer.view
        replica_ids = {*view.resident_replicas(digest), *view.assigned_replicas(digest)}
        with suppress(NotReady):  # the table is enough
            replica_ids.update(each.replica_id for each in await self._placer.residency(digest))
        await asyncio.gather(*(self._drop(replica_id, digest) for replica_id in sorted(replica_ids)))

    async def _drop(self, replica_id: str, digest: str) -> None:
        try:
            await self._replicas.unload_adapter(replica_id, digest)
        except (ReplicaGone, ReplicaUnreachable, EngineFailure, NotReady) as error:
            logger.info("no rows to free: %s", error)  # they are gone with the replica or its engine
