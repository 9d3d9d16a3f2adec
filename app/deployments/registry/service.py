"""The life of names: the parts that work on them, and the changes that take one step.

In: requests to configure, alias and describe; `loads` and `unloads` take the others. Out: the registry's values. When
a call returns every ingress knows what it changed (`publishing`). Work that takes more than one step is a job, and
belongs to `loading` and `unloading`.
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
    """What the registry needs of the adapter store."""

    @property
    def cached_digests(self) -> Collection[str]: ...

    def pin(self, digests: Collection[str]) -> None:
        """Exactly these are pinned."""


class RegistryService:
    """One event loop; the database is called in threads. `events` is what the store's tiers tell.

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
        """`sweep` is told now and then which uploads names mean, or open loads; it is called in threads."""
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
        """Follow the store's tiers and the database from now on; a second call changes nothing."""
        if self._tasks:
            return
        self._events.follow(self.loads.on_progress, self._moves.write_soon)
        self._tasks.run_forever(
            partial(sync_loop, self._registry, self.published, self.loads),
            partial(maintenance_loop, self._registry, self._use, self._sweep),
        )

    async def close(self) -> None:
        """Follow nothing any more, and leave unfinished loads to other processes at once."""
        await self._tasks.close()
        with suppress(NotReady):  # then they wait until this process has been silent for long enough
            await self._use.write()
            await asyncio.to_thread(self._registry.stores.leave)

    async def load(self, request: LoadRequest) -> RegistryJob:
        """`Loads.load`. Raises InvalidRequest for a name that cannot be one, UnsafeSource for such a source."""
        self.check_name(request.name)
        return await self.loads.load(request)

    async def load_and_wait(
        self, request: LoadRequest, read: ReadAdapter | None = None
    ) -> tuple[RegistryJob, CatalogEntry]:
        """`load`, and its end. `read`: what the source holds, if it has just been read. Raises what made it fail."""
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
        """Change how a name is treated (None: as it is); every ingress knows when this returns.

        Raises NotFound, and InvalidRequest for a description that is too long.
        """
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
        """What came to and left a replica's device, and when requests last used which digests (Unix time)."""
        if loaded or unloaded:
            await asyncio.to_thread(self._registry.catalog.note_residency, replica_id, loaded, unloaded)
        self._use.note(used_s)  # last: what fails is told again

    async def hot(self, limit: int) -> list[CatalogEntry]:
        """`Catalog.hot`, of all use until now."""
        await self._use.write()
        return await asyncio.to_thread(self._registry.catalog.hot, limit)

    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name that nobody ever asked for."""
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
        """A job as it stands now. Raises NotFound."""
        running = self.loads.running(job_id)
        if running is not None and running.tenant_id == tenant_id:
            return running
        job = await asyncio.to_thread(self._registry.jobs.get, job_id, tenant_id=tenant_id)
        if job is None:
            raise NotFound(f"there is no job {without_keys(job_id)[:80]!r}")
        return job

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest for what cannot be an adapter's or an alias's name here."""
        check_name(name)
        if name == AUTO:
            raise InvalidRequest(
                f"model {AUTO!r} lets the service choose an adapter; choose another name", param="name"
            )
        if name in self.reserved_names:
            raise InvalidRequest(f"the name {name!r} is the base model's; choose another", param="name")
