"""What may be asked of the registry, from any ingress: load, unload, alias, look.

In: calls of HTTP routes and of other Ray jobs. Out: the registry's values. The registry itself lives with
the adapter store; this class adds what only an ingress can do: free rows on the replicas, and say which
replica holds an adapter. An unload goes on when the client that asked for it leaves; one whose ingress ends is
taken up by another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from app.deployments.links.tasks import Tasks
from app.deployments.links.transport import ReplicaGone, ReplicaUnreachable
from app.deployments.placement.table import PlacementTable
from app.deployments.registry.entries import (
    AliasEntry,
    AuditRecord,
    CatalogEntry,
    Description,
    Event,
    Generation,
    RegistryJob,
    Unload,
)
from app.engine.errors import EngineFailure, NotReady

logger = logging.getLogger(__name__)

#: How often an ingress asks for unloads that nobody sees to, and says which it does. Shorter than their `UNSEEN_S`.
TAKE_UP_INTERVAL_S = 10.0
#: How often a drain asks whether a name means the contents again: then their rows need not become free.
USED_AGAIN_INTERVAL_S = 1.0


class StoreCall(Protocol):
    """A method of the adapter store's actor, by name."""

    def __call__(self, method: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]: ...


class AdapterDropper(Protocol):
    """`ServeTransport`: free an adapter's rows on a replica when no sequence uses them."""

    async def drop_adapter(self, replica_id: str, digest: str) -> int: ...


class ReplicaResidency(NamedTuple):
    """Contents on one replica's device: requests that use them, and when one last began to (Unix time)."""

    id: str
    num_requests: int
    last_used: float | None


class Management:
    """One per ingress. Every method raises NotReady while the store restarts, and what its counterpart raises."""

    def __init__(self, store: StoreCall, replicas: AdapterDropper, placement: Callable[[], PlacementTable]) -> None:
        self._store = store
        self._replicas = replicas
        self._placement = placement
        self._tasks = Tasks()  # an unload goes on when the request that began it is cancelled
        self._draining: set[str] = set()  # the jobs of unloads that this ingress sees to

    async def load(self, name: str, source: str, **options: Any) -> RegistryJob:
        """Begin to load an adapter."""
        job: RegistryJob = await self._store("manage", "load", name, source, **options)
        return job

    async def load_and_wait(self, name: str, source: str, **options: Any) -> tuple[RegistryJob, CatalogEntry]:
        """Load an adapter; when this returns, every ingress serves it."""
        result: tuple[RegistryJob, CatalogEntry] = await self._store("manage", "load_and_wait", name, source, **options)
        return result

    async def unload(self, name: str, *, wait: bool = True, **options: Any) -> tuple[RegistryJob, CatalogEntry | None]:
        """Forget a name everywhere, then free its rows once no sequence uses them, then the host's copy.

        A name that was only being loaded has no entry: its loads are cancelled.
        """
        begin = self._tasks.start(self._store("manage", "begin_unload", name, **options))
        drain = self._tasks.start(self._drain_begun(begin))
        unload, entry = await asyncio.shield(begin)
        return await asyncio.shield(drain) if wait else unload.job, entry

    async def keep_taking_up(self) -> None:
        """`take_up` until cancelled."""
        while True:
            await asyncio.sleep(TAKE_UP_INTERVAL_S)  # first: a new ingress does not know the replicas yet
            try:
                await self.take_up()
            except NotReady as error:
                logger.info("unloads that nobody sees to are asked for again: %s", error)

    async def take_up(self) -> None:
        """Go on with unloads whose ingress has ended, and with those that could not be ended."""
        left: list[Unload] = await self._store("manage", "left_unloads", tuple(self._draining))
        for unload in left:
            self._tasks.start(self._drain(unload))

    async def close(self) -> None:
        """Leave what is not finished to other ingresses."""
        await self._tasks.close()

    async def configure(self, name: str, **changes: Any) -> CatalogEntry:
        entry: CatalogEntry = await self._store("manage", "configure", name, **changes)
        return entry

    async def change_alias(self, how: str, name: str, *args: Any, **options: Any) -> AliasEntry:
        """`how` is put, promote, rollback or remove."""
        entry: AliasEntry = await self._store("manage", "change_alias", how, name, *args, **options)
        return entry

    async def describe(self, name: str) -> Description:
        description: Description = await self._store("manage", "describe", name)
        return description

    async def job(self, job_id: str) -> RegistryJob:
        job: RegistryJob = await self._store("manage", "job", job_id)
        return job

    async def generations(self, name: str) -> list[Generation]:
        generations: list[Generation] = await self._store("generations", name)
        return generations

    async def events(self, name: str | None, *, limit: int, before: int | None) -> list[Event]:
        events: list[Event] = await self._store("journal", "events", name, limit=limit, before=before)
        return events

    async def audit(self, name: str | None, *, limit: int, before: int | None) -> list[AuditRecord]:
        records: list[AuditRecord] = await self._store("journal", "audit", name, limit=limit, before=before)
        return records

    def residency(self, digest: str) -> list[ReplicaResidency]:
        """Replicas whose device holds these contents, as they last reported."""
        return [
            ReplicaResidency(replica_id, report.active.get(digest, 0), report.last_used_s.get(digest))
            for replica_id, report in sorted(self._placement().replicas.items())
            if digest in report.resident
        ]

    async def _drain_begun(self, begin: asyncio.Task[tuple[Unload, CatalogEntry | None]]) -> RegistryJob:
        return await self._drain((await begin)[0])

    async def _drain(self, unload: Unload) -> RegistryJob:
        if unload.digest is None:
            return unload.job
        self._draining.add(unload.job.id)
        try:
            if not unload.is_shared:
                await self._free(unload.digest)
            job: RegistryJob = await self._store("manage", "end_unload", unload)
            return job
        finally:
            self._draining.discard(unload.job.id)

    async def _free(self, digest: str) -> None:
        """Until no replica has rows of these contents, or a name means them again: then they are free some other time.

        New requests would keep them for ever, and are not told apart from those that the unload waits for.
        """
        drops = self._tasks.start(self._drop_everywhere(digest))
        while not (await asyncio.wait([drops], timeout=USED_AGAIN_INTERVAL_S))[0]:
            with suppress(NotReady):  # asked again
                if await self._store("manage", "is_used", digest):
                    return
        drops.result()

    async def _drop_everywhere(self, digest: str) -> None:
        await asyncio.gather(*(self._drop(replica_id, digest) for replica_id in self._placement().replicas))

    async def _drop(self, replica_id: str, digest: str) -> None:
        try:
            await self._replicas.drop_adapter(replica_id, digest)
        except (ReplicaGone, ReplicaUnreachable, EngineFailure, NotReady) as error:
            logger.info("no rows to free: %s", error)  # they go with the replica, or with its engine
