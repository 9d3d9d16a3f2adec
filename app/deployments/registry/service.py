"""The registry's service: loads, unloads, and changes that take one step.

When a call returns, every ingress has its change (`feed.change_feed`). Work of several steps is a job of `loads` or
`unloads`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from app.deployments.registry.catalog import not_registered_error
from app.deployments.registry.event_log import MoveWriter
from app.deployments.registry.feed.background_loops import maintenance_loop, sync_loop
from app.deployments.registry.feed.change_feed import ChangeFeed
from app.deployments.registry.jobs.load_jobs import LoadJobs, Reader
from app.deployments.registry.jobs.unload_jobs import UnloadJobs
from app.deployments.registry.last_used import LastUsed
from app.deployments.registry.models import (
    AUTO,
    AliasEntry,
    CatalogEntry,
    Description,
    LoadRequest,
    ReadAdapter,
    RegistryJob,
    State,
    check_description,
    check_name,
    is_name,
)
from app.deployments.registry.registry import Registry
from app.deployments.registry.tier_events import TierEvents
from app.deployments.rpc.background_tasks import Tasks
from app.engine.errors import InvalidRequest, NotFound, NotReady
from app.redaction import without_keys


class HostCache(Reader, Protocol):
    """What the registry needs of the host cache."""

    @property
    def cached_digests(self) -> Collection[str]: ...

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these."""


class RegistryService:
    """One event loop; the database is called in threads. `events` come from the store's tiers.

    `reserved_names`, the base model's, may be replaced.
    """

    def __init__(
        self,
        registry: Registry,
        store: HostCache,
        events: TierEvents,
        *,
        reserved_names: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        sweep: Callable[[Collection[str]], object] = lambda _: None,
    ) -> None:
        """`sweep` is called in threads with the upload sources in use."""
        self._registry = registry
        self._sweep = sweep
        self._store = store
        self._events = events
        self.reserved_names = frozenset(reserved_names)
        self._moves = MoveWriter(registry.catalog.note_moves)
        self._use = LastUsed(registry.catalog.note_use)
        self.published = ChangeFeed(registry, store.pin)
        self.loads = LoadJobs(registry, store, self.published, clock)
        self.unloads = UnloadJobs(registry, store, self.published, self.loads, clock)
        self._tasks = Tasks()

    def start(self) -> None:
        """Follow the tiers and the database from now on; further calls change nothing."""
        if self._tasks:
            return
        self._events.follow(self.loads.on_progress, self._moves.write_soon)
        self._tasks.run_forever(
            partial(sync_loop, self._registry, self.published, self.loads),
            partial(maintenance_loop, self._registry, self._use, self._sweep),
        )

    async def close(self) -> None:
        """Stop following, and leave unfinished loads to other processes at once."""
        await self._tasks.close()
        with suppress(NotReady):  # then the loads wait until this store's lease expires
            await self._use.write()
            await asyncio.to_thread(self._registry.stores.leave)

    async def load(self, request: LoadRequest) -> RegistryJob:
        """`LoadJobs.load`. Raises InvalidRequest for an invalid name, UnsafeSource."""
        self.check_name(request.name)
        return await self.loads.load(request)

    async def load_and_wait(
        self, request: LoadRequest, read: ReadAdapter | None = None
    ) -> tuple[RegistryJob, CatalogEntry]:
        """Load and wait for the end. `read`: the adapter, if the source was just read. Raises what made it fail."""
        self.check_name(request.name)
        return await self.loads.load_and_wait(request, read)

    async def configure(
        self,
        name: str,
        *,
        tenant_id: str,
        who: str,
        pinned: bool | None = None,
        traffic_weight: float | None = None,
        description: str | None = None,
    ) -> CatalogEntry:
        """Change the settings of a name (None: unchanged). Raises NotFound, InvalidRequest for a long description."""
        check_description(description)
        configure = partial(self._registry.catalog.configure, name, tenant_id=tenant_id, who=who)
        return await self.published.change(
            lambda: configure(pinned=pinned, traffic_weight=traffic_weight, description=description)
        )

    async def put_alias(self, name: str, targets: Mapping[str, float], *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.put`; every ingress knows when it returns, as with the other changes of aliases."""
        self.check_name(name)
        aliases = self._registry.aliases
        return await self.published.change(lambda: aliases.put(name, targets, tenant_id=tenant_id, who=who))

    async def promote_alias(self, name: str, target: str, *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.promote`."""
        self.check_name(name)
        aliases = self._registry.aliases
        return await self.published.change(lambda: aliases.promote(name, target, tenant_id=tenant_id, who=who))

    async def roll_back_alias(self, name: str, version: int | None, *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.rollback`."""
        self.check_name(name)
        aliases = self._registry.aliases
        return await self.published.change(lambda: aliases.rollback(name, version, tenant_id=tenant_id, who=who))

    async def remove_alias(self, name: str, *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.remove`."""
        self.check_name(name)
        aliases = self._registry.aliases
        return await self.published.change(lambda: aliases.remove(name, tenant_id=tenant_id, who=who))

    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        """Record what a replica's device loaded and unloaded, and when requests last used which digests (Unix time)."""
        if loaded or unloaded:
            await asyncio.to_thread(self._registry.catalog.note_residency, replica_id, loaded, unloaded)
        self._use.note(used_s)  # last: the replica repeats a failed report

    async def hot(self, limit: int) -> list[CatalogEntry]:
        """`Catalog.hot`, including uses that are not stored yet."""
        await self._use.write()
        return await asyncio.to_thread(self._registry.catalog.hot, limit)

    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name without an entry or job."""
        if not is_name(name):
            raise not_registered_error(name)
        entry, job = await asyncio.gather(
            asyncio.to_thread(self._registry.catalog.get, name, tenant_id=tenant_id),
            asyncio.to_thread(self._registry.jobs.latest, name, tenant_id=tenant_id),
        )
        if entry is None and (job is None or job.state is State.REMOVED):
            raise not_registered_error(name)
        if entry is not None:
            times_s = (entry.last_used_s, self._use.last_s(entry.ref.digest))
            entry = replace(entry, last_used_s=max((time_s for time_s in times_s if time_s is not None), default=None))
        is_on_host = entry is not None and entry.ref.digest in self._store.cached_digests
        return Description(entry, job and (self.loads.running(job.id) or job), is_on_host)

    async def job(self, job_id: str, *, tenant_id: str) -> RegistryJob:
        """A job in its present state. Raises NotFound."""
        running = self.loads.running(job_id)
        if running is not None and running.tenant_id == tenant_id:
            return running
        job = await asyncio.to_thread(self._registry.jobs.get, job_id, tenant_id=tenant_id)
        if job is None:
            raise NotFound(f"there is no job {without_keys(job_id)[:80]!r}")
        return job

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest for an invalid or reserved name."""
        check_name(name)
        if name == AUTO:
            raise InvalidRequest(
                f"model {AUTO!r} lets the service choose an adapter; choose another name", param="name"
            )
        if name in self.reserved_names:
            raise InvalidRequest(f"the name {name!r} is the base model's; choose another", param="name")
