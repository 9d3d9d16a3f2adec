"""Unload jobs: a name goes out of service, then its contents out of memory.

An unload cancels the earlier loads of its name. An ingress then frees the rows on replicas (`ingress.adapter_admin`),
since only ingresses can, and the store frees the host copy. An unload whose ingress has ended, or could not report the
end, is given to the next ingress that asks. A replica that no ingress could reach asks for unreferenced contents itself
(`replica.orphan_cleanup`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from sqlalchemy import select

from app.deployments.registry.catalog import UnloadStarted
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, generations
from app.deployments.registry.feed.change_feed import ChangeFeed
from app.deployments.registry.jobs.load_jobs import LoadJobs, Reader
from app.deployments.registry.models import CatalogEntry, RegistryJob, State, UnloadResult
from app.deployments.registry.registry import Registry
from app.logging import LogEvent

logger = logging.getLogger(__name__)

#: An unload that no ingress has claimed for so long is orphaned.
ORPHAN_TIMEOUT_S = 35.0


class UnloadJobs:
    """One event loop; the database is called in threads."""

    def __init__(
        self,
        registry: Registry,
        store: Reader,
        change_feed: ChangeFeed,
        loads: LoadJobs,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._store = store
        self._change_feed = change_feed
        self._loads = loads
        self._clock = clock
        self._seen_s: dict[str, float] = {}  # unload job id -> when an ingress last claimed it

    async def begin(self, name: str, *, tenant_id: str, who: str) -> tuple[UnloadResult, CatalogEntry | None]:
        """Take a name out of service; when this returns no ingress routes to it. `end` follows.

        Unfinished loads of the name end with AdapterUnloaded; if there was nothing else, the unload has no digest and
        is over. Raises NotFound, AdapterBusy.
        """
        started: list[UnloadStarted] = []

        def take_out() -> CatalogEntry | None:
            started.append(self._registry.catalog.begin_unload(name, tenant_id=tenant_id, who=who))
            return started[0].entry

        entry = await self._change_feed.change(take_out)
        self._loads.cancel(started[0].cancelled)
        return await asyncio.to_thread(self._unload, started[0].job), entry

    async def end(self, unload: UnloadResult) -> RegistryJob:
        """No device has rows of the adapter any more: free the host copy and end the job."""
        assert unload.digest is not None, "then it is over"
        if not await asyncio.to_thread(self._registry.catalog.is_used, unload.digest):
            self._store.invalidate(unload.digest)
        job = unload.job
        logger.info(LogEvent("adapter removed", name=job.name, tenant=job.tenant_id, by=job.requested_by))
        return await asyncio.to_thread(self._registry.catalog.finish_unload, unload.job)

    async def unreferenced_digests(self, digests: Collection[str]) -> list[str]:
        """The digests that names have meant and none means any more; unknown digests are not among them."""
        return await asyncio.to_thread(_unreferenced_digests, self._registry.database, digests)

    async def orphaned_unloads(self, own_ids: Collection[str]) -> list[UnloadResult]:
        """Unloads without an ingress, for the caller to end; `own_ids` are the ids of those it already works on.

        If the former ingress lives after all, two ingresses end the same unload, which is harmless.
        """
        now_s = self._clock()
        jobs = await asyncio.to_thread(self._registry.jobs.unfinished_jobs, "unload")
        last_s = {job.id: max(job.created_s, self._seen_s.get(job.id, 0.0)) for job in jobs}
        orphaned = [job for job in jobs if job.id not in own_ids and now_s - last_s[job.id] > ORPHAN_TIMEOUT_S]
        self._seen_s = last_s | dict.fromkeys((*own_ids, *(job.id for job in orphaned)), now_s)
        return [await asyncio.to_thread(self._unload, job) for job in orphaned]

    def _unload(self, job: RegistryJob) -> UnloadResult:
        return UnloadResult(job, job.digest, job.digest is None or self._registry.catalog.is_used(job.digest))


def _unreferenced_digests(database: Database, digests: Collection[str]) -> list[str]:
    is_meant = select(adapters.c.name).where(
        adapters.c.base_digest == database.base_digest,
        adapters.c.digest == generations.c.digest,
        adapters.c.state == State.LOADED,
    )
    query = select(generations.c.digest).where(
        generations.c.base_digest == database.base_digest, generations.c.digest.in_(digests), ~is_meant.exists()
    )
    with database.read() as connection:
        return list(connection.scalars(query.distinct()))
