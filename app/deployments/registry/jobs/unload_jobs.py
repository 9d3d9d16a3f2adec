"""Unloads: a name goes out of service, then its contents out of memory.

In: requests to unload. Out: jobs whose work an ingress does, for only an ingress can free rows on replicas. An unload
cancels the loads of its name that were asked for before. One whose ingress ended, or could not tell that it is done, is
given to the next ingress that asks. Rows are freed by the ingress (`ingress.management`), the host's copy by the
store; a replica that nobody could tell asks what is gone (`replica.leftovers`).
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

#: An unload that no ingress has spoken of for this long is given to the one that asks.
ORPHAN_TIMEOUT_S = 35.0


class UnloadJobs:
    """One event loop; the database is called in threads."""

    def __init__(
        self,
        registry: Registry,
        store: Reader,
        published: ChangeFeed,
        loads: LoadJobs,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._store = store
        self._published = published
        self._loads = loads
        self._clock = clock
        self._seen_s: dict[str, float] = {}  # unloads, and when an ingress last said that it sees to them

    async def begin(self, name: str, *, tenant_id: str, who: str) -> tuple[UnloadResult, CatalogEntry | None]:
        """Take a name out of service: when this returns no ingress knows it. `end` follows, or `orphaned`.

        Loads of it that were asked for before end with AdapterUnloaded; if there was nothing else the unload has no
        digest, and is over. Raises NotFound, AdapterBusy.
        """
        done: list[UnloadStarted] = []

        def take_out() -> CatalogEntry | None:
            done.append(self._registry.catalog.begin_unload(name, tenant_id=tenant_id, who=who))
            return done[0].entry

        entry = await self._published.change(take_out)
        self._loads.cancel(done[0].cancelled)
        return await asyncio.to_thread(self._unload, done[0].job), entry

    async def end(self, unload: UnloadResult) -> RegistryJob:
        """No sequence uses the adapter any more and its rows are free: free the host's copy, and be done."""
        assert unload.digest is not None, "then it is over"
        if not await self.is_used(unload.digest):
            self._store.forget(unload.digest)
        job = unload.job
        logger.info(LogEvent("adapter removed", name=job.name, tenant=job.tenant_id, by=job.requested_by))
        return await asyncio.to_thread(self._registry.catalog.finish_unload, unload.job)

    async def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        return await asyncio.to_thread(self._registry.catalog.is_used, digest)

    async def unreferenced(self, digests: Collection[str]) -> list[str]:
        """Those of these contents that names have meant and none means any more; contents never heard of are not."""
        return await asyncio.to_thread(_unreferenced, self._registry.database, digests)

    async def orphaned_unloads(self, own_ids: Collection[str]) -> list[UnloadResult]:
        """Unloads that nobody sees to, for the caller to end; `own_ids` are the ids of those that it sees to already.

        Their ingress has ended, or could not tell the registry. Should it be there after all, two end the same unload.
        """
        now_s = self._clock()
        jobs = await asyncio.to_thread(self._registry.jobs.unfinished_jobs, "unload")
        last_s = {job.id: max(job.created_s, self._seen_s.get(job.id, 0.0)) for job in jobs}
        orphaned = [job for job in jobs if job.id not in own_ids and now_s - last_s[job.id] > ORPHAN_TIMEOUT_S]
        self._seen_s = last_s | dict.fromkeys((*own_ids, *(job.id for job in orphaned)), now_s)
        return [await asyncio.to_thread(self._unload, job) for job in orphaned]

    def _unload(self, job: RegistryJob) -> UnloadResult:
        return UnloadResult(job, job.digest, job.digest is None or self._registry.catalog.is_used(job.digest))


def _unreferenced(database: Database, digests: Collection[str]) -> list[str]:
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
