"""All that is asked of the store's process: the registry's calls and the adapters' bytes, in one class without Ray.

In: the calls of ingresses, replicas and placement, which hold it as an `actor_proxy`. Out: the registry's values,
handles to packed adapters, and three published tables: names, pins, traffic shares. What a call changes every ingress
knows when the call returns. Rule: a call that waits is one of few (a watcher's, or a load's); whoever wants bytes that
are not here is told to ask again. Work on names is the registry's, bytes are `HostAdapterCache`'s; this class only joins
them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from app.config import PreloadedAdapter
from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import (
    DEFAULT_TENANT,
    AliasEntry,
    AliasVersion,
    AuditRecord,
    CatalogEntry,
    Description,
    Event,
    Generation,
    LoadRequest,
    Registered,
    Registration,
    RegistryJob,
    State,
    UnloadResult,
)
from app.deployments.registry.pins import Pins
from app.deployments.rpc.actor_proxy import remote_method
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.store.failure_backoff import FIRST_S
from app.deployments.store.tier_counters import TIERS, Tier
from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterQuarantined, AdapterUnreadable, CompositionRefused, NotReady, PolyloraError
from app.logging import LogEvent

if TYPE_CHECKING:  # a database and its tables: a process that only calls the store's starts without
    from app.deployments.registry.jobs.auto_registration import AutoRegistration
    from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
    from app.deployments.registry.registry import Registry
    from app.deployments.registry.service import RegistryService
    from app.deployments.store.host_cache import HostAdapterCache
    from app.deployments.store.uploads import Uploads

logger = logging.getLogger(__name__)

H = TypeVar("H")

#: How long a fetch may wait in this process, and how many may at a time; those beyond are answered at once.
HOLD_S = 0.5
MAX_HELD = 100
#: Adapters that are read ahead at a time; there is no harm in not reading one ahead.
MAX_EXPECTED = 1000


class StoreParts(NamedTuple, Generic[H]):
    """What the service works with (`opening.OpenStore`). `claim_piece` has them work with other settings, which are JSON."""

    registry: Registry
    lifecycle: RegistryService
    bytes: HostAdapterCache[H]
    preloaded: Sequence[PreloadedAdapter]
    unread: LazyRegistrations
    take: Callable[[str], Awaitable[StoreParts[H]]] | None = None
    resolution: AutoRegistration | None = None
    uploads: Uploads | None = None
    roots: Sequence[Path] = ()


class StoreService(Generic[H]):
    """One event loop. `called` is called whenever a process calls."""

    def __init__(self, parts: StoreParts[H], called: Callable[[], None]) -> None:
        self._parts = parts
        self._registry, self._lifecycle, self._bytes = parts.registry, parts.lifecycle, parts.bytes
        self._called = called
        self._preloading: asyncio.Task[None] | None = None
        self._preloads: tuple[Sequence[PreloadedAdapter], Sequence[Path]] = ((), ())
        self._num_held = 0
        self._expecting = Tasks()

    @remote_method
    async def preload(self, settings: str | None = None) -> None:
        """Take over the settings of a service that starts, and register the adapters that they name.

        Once however many ingresses ask. Raises what makes an adapter fail, and ConfigError for settings that cannot be.
        """
        from app.deployments.registry.jobs.preload import preload  # a database: only the store's own process needs it

        self._called()
        self._lifecycle.start()
        if settings is not None and self._parts.take is not None:
            self._parts = await self._parts.take(settings)
        is_done = self._preloading is not None and self._preloading.done()
        wanted, roots = self._parts.preloaded, self._parts.roots
        if (wanted, roots) != self._preloads or self._preloading is None or (is_done and self._preloading.exception()):
            self._preloads = wanted, roots
            work = preload(self._registry, self._lifecycle, wanted, tenant_id=DEFAULT_TENANT, roots=roots)
            self._preloading = asyncio.create_task(work)
        await asyncio.shield(self._preloading)

    # -- adapters and their names -------------------------------------------------------------------

    @remote_method
    async def load(self, request: LoadRequest) -> RegistryJob:
        """Begin to load an adapter. Raises InvalidRequest, UnsafeSource."""
        self._called()
        return await self._lifecycle.load(request)

    @remote_method
    async def load_and_wait(self, request: LoadRequest) -> tuple[RegistryJob, CatalogEntry]:
        """Load an adapter; when this returns every ingress serves it. Raises what made it fail."""
        self._called()
        return await self._lifecycle.load_and_wait(request)

    @remote_method
    async def register(self, registrations: Sequence[Registration], *, tenant_id: str, who: str) -> Registered:
        """Make names known without reading their adapters: all, or none. Raises InvalidRequest, UnsafeSource."""
        self._called()
        return await self._parts.unread.register(registrations, tenant_id=tenant_id, who=who)

    @remote_method
    async def read(self, name: str, *, tenant_id: str, who: str) -> tuple[RegistryJob | None, CatalogEntry]:
        """Load a registered name that is not read yet; no job if it is. Raises NotFound and what made it fail."""
        self._called()
        return await self._parts.unread.read(name, tenant_id=tenant_id, who=who)

    @remote_method
    async def read_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        """`read`, for who uses adapters. Raises AdapterUnreadable, which names no place of the server."""
        self._called()
        await self._parts.unread.read_for_request(name, tenant_id=tenant_id, who=who)

    @remote_method
    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:
        """Look for a name that nobody has registered: True when every ingress serves it. Raises what reading raises."""
        self._called()
        resolution = self._parts.resolution
        return resolution is not None and await resolution.resolve(name, tenant_id=tenant_id, who=who)

    @remote_method
    async def upload(self, request: LoadRequest, config: bytes, weights: bytes) -> tuple[RegistryJob, CatalogEntry]:
        """`load_and_wait` of an adapter's two files; the source of the request is not read.

        Raises what `load_and_wait` raises, and AdapterTooLarge or QueueFull where there is no room for the files.
        """
        self._called()
        assert self._parts.uploads is not None, "a store that is asked for this has a folder for it"
        self._lifecycle.check_name(request.name)  # before anything is written
        with ExitStack() as stack:
            source = await asyncio.to_thread(stack.enter_context, self._parts.uploads.storage(config, weights))
            return await self._lifecycle.load_and_wait(replace(request, source=source))

    @remote_method
    async def begin_unload(self, name: str, *, tenant_id: str, who: str) -> tuple[UnloadResult, CatalogEntry | None]:
        """Take a name out of service; `end_unload` follows when its rows are free. Raises NotFound, AdapterBusy."""
        self._called()
        return await self._lifecycle.unloads.begin(name, tenant_id=tenant_id, who=who)

    @remote_method
    async def end_unload(self, unload: UnloadResult) -> RegistryJob:
        """No device has rows of it any more: free the host's copy too, and be done."""
        self._called()
        return await self._lifecycle.unloads.end(unload)

    @remote_method
    async def left_unloads(self, seen_to: Collection[str]) -> list[UnloadResult]:
        """Unloads that nobody sees to, for the caller to end; `seen_to`: ids of jobs that it sees to already."""
        self._called()
        return await self._lifecycle.unloads.left(seen_to)

    @remote_method
    async def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        self._called()
        return await self._lifecycle.unloads.is_used(digest)

    @remote_method
    async def gone(self, digests: Collection[str]) -> list[str]:
        """Those of these contents that names have meant and none means any more."""
        self._called()
        return await self._lifecycle.unloads.gone(digests)

    @remote_method
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
        """Change how a name is treated (None: as it is). Raises NotFound, AdapterTooLarge for a pin too many."""
        self._called()
        return await self._lifecycle.configure(
            name, tenant_id=tenant_id, who=who, pinned=pinned, traffic_weight=traffic_weight, description=description
        )

    @remote_method
    async def put_alias(self, name: str, targets: Mapping[str, float], *, tenant_id: str, who: str) -> AliasEntry:
        """Send an alias's requests to these adapters, by weight. Raises InvalidRequest, NotFound."""
        self._called()
        return await self._lifecycle.put_alias(name, targets, tenant_id=tenant_id, who=who)

    @remote_method
    async def promote_alias(self, name: str, target: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Send all of an alias's requests to one of its targets. Raises InvalidRequest, NotFound."""
        self._called()
        return await self._lifecycle.promote_alias(name, target, tenant_id=tenant_id, who=who)

    @remote_method
    async def roll_back_alias(self, name: str, version: int | None, *, tenant_id: str, who: str) -> AliasEntry:
        """Bring back a version; None: the one before the last change. Raises InvalidRequest, NotFound."""
        self._called()
        return await self._lifecycle.roll_back_alias(name, version, tenant_id=tenant_id, who=who)

    @remote_method
    async def remove_alias(self, name: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Forget an alias. Raises NotFound."""
        self._called()
        return await self._lifecycle.remove_alias(name, tenant_id=tenant_id, who=who)

    @remote_method
    async def alias_versions(self, name: str, *, tenant_id: str) -> list[AliasVersion]:
        """Everything an alias has stood for, newest first. Raises NotFound."""
        return await asyncio.to_thread(self._registry.aliases.versions, name, tenant_id=tenant_id)

    # -- what is known of them ----------------------------------------------------------------------

    @remote_method
    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name that nobody ever asked for."""
        self._called()
        description = await self._lifecycle.describe(name, tenant_id=tenant_id)
        entry, job = description.entry, description.job
        if entry is None or not entry.is_read:
            is_failed = entry is not None and job is not None and job.state is State.FAILED
            return description._replace(last_error=job.reason if is_failed and job is not None else None)
        failure = self._bytes.failure(entry.ref)
        return description._replace(last_error=None if failure is None else failure.reason)

    @remote_method
    async def job(self, job_id: str, *, tenant_id: str) -> RegistryJob:
        """A job as it stands now. Raises NotFound."""
        self._called()
        return await self._lifecycle.job(job_id, tenant_id=tenant_id)

    @remote_method
    async def generations(self, name: str, *, tenant_id: str) -> list[Generation]:
        """Everything a name has meant, newest first."""
        self._called()
        return await asyncio.to_thread(self._registry.catalog.generations, name, tenant_id=tenant_id)

    @remote_method
    async def events(self, name: str | None, *, limit: int, before: str | None, tenant_id: str) -> list[Event]:
        """What happened, newest first; `before` is the id of the last record of the page before this one."""
        self._called()
        journal = self._registry.journal
        return await asyncio.to_thread(journal.events, name, limit=limit, before=before, tenant_id=tenant_id)

    @remote_method
    async def audit(self, name: str | None, *, limit: int, before: str | None, tenant_id: str) -> list[AuditRecord]:
        """Who asked for what, newest first; `before` as with `events`."""
        self._called()
        journal = self._registry.journal
        return await asyncio.to_thread(journal.audit, name, limit=limit, before=before, tenant_id=tenant_id)

    @remote_method
    async def hot(self, limit: int) -> list[CatalogEntry]:
        """What a new replica should hold before it is ready, beside what is pinned: the hottest first."""
        self._called()
        return await self._lifecycle.hot(limit)

    @remote_method
    async def stats(self) -> dict[Tier, dict[str, float]]:
        """What the tiers of the store did and hold."""
        self._called()
        return {tier: self._bytes.counts.of(tier) for tier in TIERS}

    # -- what replicas need -------------------------------------------------------------------------

    @remote_method
    async def fetch(self, ref: AdapterRef, again: bool = False) -> H | None:
        """The packed adapter with this digest. Raises AdapterUnreadable if it cannot be read.

        The error is for clients and names no place of this server; the log and `describe` do. None: the adapter is
        being read; `again`: this caller has had that answer before. Replicas wait with `replica.fetcher.fetch_packed`.
        """
        self._called()
        wait_s = HOLD_S if self._num_held < MAX_HELD else 0.0
        self._num_held += 1
        try:
            return await self._bytes.fetch_soon(ref, wait_s, again=again)
        except (NotReady, CompositionRefused):
            raise
        except PolyloraError as error:
            if not isinstance(error, AdapterQuarantined):  # it was tried just now
                known = {"name": ref.name, "tenant": ref.tenant_id, "digest": ref.digest[:12]}
                logger.warning(LogEvent("adapter cannot be read", **known, reason=str(error)))
            wait_s = error.retry_after_s if isinstance(error, AdapterQuarantined) else FIRST_S
            raise AdapterUnreadable(
                f"adapter {ref.name!r} is registered but cannot be read at the moment, and is tried again in "
                f"{math.ceil(wait_s)} s; whoever manages it sees why at GET /v1/loras/{ref.name}",
                retry_after_s=wait_s,
            ) from None
        finally:
            self._num_held -= 1

    @remote_method
    async def expect(self, ref: AdapterRef) -> None:
        """Begin what `fetch` will ask for soon. What goes wrong is for `fetch` to meet."""
        self._called()
        if len(self._expecting) < MAX_EXPECTED:
            self._expecting.start(self._bytes.expect(ref))

    @remote_method
    async def lost(self, digest: str) -> None:
        """What `fetch` answered does not resolve any more: read the adapter again."""
        self._called()
        self._bytes.lost(digest)

    @remote_method
    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        """What came to and left a replica's device, and when requests last used which digests (Unix time)."""
        self._called()
        await self._lifecycle.observe(replica_id, loaded, unloaded, used_s)

    # -- published tables ---------------------------------------------------------------------------

    @remote_method
    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Entry]] | None:
        """A page of the registry's table that `get_object` lacks, as soon as there is one; None after `timeout_s`."""
        self._called()
        self._lifecycle.start()
        self._lifecycle.published.check_held(held)
        return await self._lifecycle.published.table.newer(held, watcher_id, timeout_s)

    @remote_method
    async def watch_pins(self, held: Version | None, watcher_id: str, timeout_s: float) -> tuple[Version, Pins] | None:
        """The pinned adapters, as soon as they differ from `get_object`; None after `timeout_s`."""
        self._called()
        self._lifecycle.published.check_held(held)
        return await self._lifecycle.published.pins.newer(held, watcher_id, timeout_s)

    @remote_method
    async def watch_shares(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[str, float]] | None:
        """The expected shares of the traffic that `get_object` lacks, as soon as there are some; None after `timeout_s`."""
        self._called()
        self._lifecycle.published.check_held(held)
        return await self._lifecycle.published.shares.newer(held, watcher_id, timeout_s)
