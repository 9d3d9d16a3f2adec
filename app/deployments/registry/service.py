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

from app.deployments.registry.aliases import Aliases
from app.deployments.registry.catalog import not_registered_error
from app.deployments.registry.db.retention import trim, uploads_in_use
from app.deployments.registry.event_log import MoveWriter
from app.deployments.registry.feed.change_feed import POLL_INTERVAL_S, ChangeFeed
from app.deployments.registry.jobs.failure_backoff import Failure
from app.deployments.registry.jobs.load_jobs import LoadJobs, Reader
from app.deployments.registry.jobs.store_leases import BEAT_INTERVAL_S, Heartbeat
from app.deployments.registry.jobs.unload_jobs import UnloadJobs
from app.deployments.registry.last_used import WRITE_INTERVAL_S, LastUsed
from app.deployments.registry.models import (
    AUTO,
    DEFAULT_TENANT,
    AliasEntry,
    CatalogEntry,
    Description,
    LoadRequest,
    ReadAdapter,
    RegistryJob,
    State,
    check_description,
    not_found_error,
)
from app.deployments.registry.registry import Registry
from app.deployments.registry.tier_events import TierEvents
from app.deployments.rpc.background_tasks import Tasks, repeat
from app.engine.adapters.card import AdapterRef
from app.engine.errors import InvalidRequest, NotReady
from app.model_names import check_name, is_name, split_version

#: How long the heartbeat waits for ingresses to receive new changes before it reports an older revision.
_SETTLE_S = 0.5
#: How often old events, audit records and jobs are deleted.
TRIM_INTERVAL_S = 600.0


class HostCache(Reader, Protocol):
    """What the registry needs of the host cache."""

    @property
    def cached_digests(self) -> Collection[str]: ...

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these."""

    def failure(self, ref: AdapterRef) -> Failure | None:
        """Why the last requested read of these contents failed."""


class RegistryService:
    """One event loop; the database is called in threads. `events` come from the store's tiers."""

    def __init__(
        self,
        registry: Registry,
        store: HostCache,
        events: TierEvents,
        *,
        clock: Callable[[], float] = time.time,
        sweep: Callable[[Collection[str]], object] = lambda _: None,
    ) -> None:
        """`sweep` is called in threads with the upload sources in use."""
        self._registry = registry
        self._sweep = sweep
        self._store = store
        self._events = events
        self._moves = MoveWriter(registry.catalog.note_moves)
        self._last_used = LastUsed(registry.catalog.note_use)
        self.change_feed = ChangeFeed(registry, store.pin)
        self.loads = LoadJobs(registry, store, self.change_feed, clock)
        self.unloads = UnloadJobs(registry, store, self.change_feed, self.loads, clock)
        self._tasks = Tasks()

    def start(self) -> None:
        """Follow the tiers and the database from now on; further calls change nothing."""
        if self._tasks:
            return
        self._events.follow(self.loads.on_progress, self._moves.write_soon)
        self._tasks.run_forever(
            partial(sync_loop, self._registry, self.change_feed, self.loads),
            partial(maintenance_loop, self._registry, self._last_used, self._sweep),
        )

    async def close(self) -> None:
        """Stop following, and leave unfinished loads to other processes at once."""
        await self._tasks.close()
        with suppress(NotReady):  # then the loads wait until this store's lease expires
            await self._last_used.write()
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
        defaults: str | None = None,
    ) -> CatalogEntry:
        """Change the settings of a name (None: unchanged). Raises NotFound, InvalidRequest for a long description."""
        check_description(description)
        configure = partial(self._registry.catalog.configure, name, tenant_id=tenant_id, who=who)
        return await self.change_feed.change(
            lambda: configure(pinned=pinned, traffic_weight=traffic_weight, description=description, defaults=defaults)
        )

    async def change_alias(self, name: str, tenant_id: str, change: Callable[[Aliases], AliasEntry]) -> AliasEntry:
        """Change an alias; every ingress has the change when this returns. Raises InvalidRequest for its name.

        A public alias may have the base model's name.
        """
        if tenant_id != DEFAULT_TENANT or name not in self._registry.aliases.base_names:
            self.check_name(name)
        return await self.change_feed.change(lambda: change(self._registry.aliases))

    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        """Record what a replica's device loaded and unloaded, and when requests last used which digests (Unix time)."""
        if loaded or unloaded:
            await asyncio.to_thread(self._registry.catalog.note_residency, replica_id, loaded, unloaded)
        self._last_used.note(used_s)  # last: the replica repeats a failed report

    async def hot(self, limit: int) -> list[CatalogEntry]:
        """`Catalog.hot`, including uses that are not stored yet."""
        await self._last_used.write()
        return await asyncio.to_thread(self._registry.catalog.hot, limit)

    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name without an entry or job."""
        plain, version = split_version(name)
        if not is_name(plain):
            raise not_registered_error(name)
        entry, job = await asyncio.gather(
            asyncio.to_thread(self._registry.catalog.get, name, tenant_id=tenant_id),
            asyncio.to_thread(self._registry.jobs.latest, plain, tenant_id=tenant_id),
        )
        if entry is None and (version is not None or job is None or job.state is State.REMOVED):
            raise not_registered_error(name)
        if entry is not None:
            times_s = (entry.last_used_s, self._last_used.last_s(entry.ref.digest))
            entry = replace(entry, last_used_s=max((time_s for time_s in times_s if time_s is not None), default=None))
        is_on_host = entry is not None and entry.ref.digest in self._store.cached_digests
        job = job and (self.loads.running(job.id) or job)
        return Description(entry, job, is_on_host, self._last_error(entry, job))

    def _last_error(self, entry: CatalogEntry | None, job: RegistryJob | None) -> str | None:
        """Why the adapter could not be read the last time, if it could not."""
        if entry is None:
            return None
        if not entry.is_read:
            return job.reason if job is not None and job.state is State.FAILED else None
        failure = self._store.failure(entry.ref)
        return None if failure is None else failure.reason

    async def job(self, job_id: str, *, tenant_id: str) -> RegistryJob:
        """A job in its present state. Raises NotFound."""
        running = self.loads.running(job_id)
        if running is not None and running.tenant_id == tenant_id:
            return running
        job = await asyncio.to_thread(self._registry.jobs.get, job_id, tenant_id=tenant_id)
        if job is None:
            raise not_found_error("job", job_id)
        return job

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest for an invalid or reserved name."""
        check_name(name)
        if name == AUTO:
            raise InvalidRequest(
                f"model {AUTO!r} lets the service choose an adapter; choose another name", param="name"
            )
        if name in self._registry.aliases.base_names:
            raise InvalidRequest(f"the name {name!r} is the base model's; choose another", param="name")


async def sync_loop(registry: Registry, change_feed: ChangeFeed, loads: LoadJobs) -> None:
    """Publish other processes' changes, send heartbeats and adopt the loads of dead processes; until cancelled."""
    settled, beat_s = -1, -BEAT_INTERVAL_S

    async def turn() -> None:
        nonlocal settled, beat_s
        await change_feed.publish_newer()
        revision = change_feed.revision
        if revision != settled or time.monotonic() - beat_s >= BEAT_INTERVAL_S:
            is_settled = await change_feed.table.wait_until_current(_SETTLE_S)
            settled, beat_s = revision if is_settled else settled, time.monotonic()
            beat = await _beat_to_completion(registry.stores.beat, max(settled, 0))
            await loads.adopt(beat.adopted)

    await repeat(turn, POLL_INTERVAL_S, "following the registry's database", first_after_s=0.0)


async def maintenance_loop(registry: Registry, last_used: LastUsed, sweep: Callable[[Collection[str]], object]) -> None:
    """Store last uses, delete old rows, and call `sweep` with the uploads in use; until cancelled."""
    trimmed_s = time.monotonic()

    async def turn() -> None:
        nonlocal trimmed_s
        await last_used.write()
        await asyncio.to_thread(lambda: sweep(uploads_in_use(registry.database)))
        if time.monotonic() - trimmed_s >= TRIM_INTERVAL_S:
            trimmed_s = time.monotonic()
            await asyncio.to_thread(trim, registry.database)

    await repeat(turn, WRITE_INTERVAL_S, "the registry's maintenance")


async def _beat_to_completion(beat: Callable[[int], Heartbeat], revision: int) -> Heartbeat:
    """Send a heartbeat in a thread and wait for it even when cancelled: it must not follow the message that this store
    leaves.
    """
    beating = asyncio.ensure_future(asyncio.to_thread(beat, revision))
    try:
        return await asyncio.shield(beating)
    except asyncio.CancelledError:
        await asyncio.wait([beating])
        raise
