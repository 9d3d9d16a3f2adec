"""The calls of the store's process: the registry's and those for adapters' bytes, in one class without Ray.

Ingresses, replicas and placement hold it as an `actor_proxy`. When a call returns, every ingress has its change. Few
calls wait: a watcher's, a load's, and a bounded number of fetches; the others are answered at once and asked again.
Names are the registry's work, bytes `HostAdapterCache`'s; this class joins them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.jobs.failure_backoff import unreadable_error
from app.deployments.registry.models import (
    AliasEntry,
    AliasVersion,
    AuditRecord,
    CatalogEntry,
    Description,
    Event,
    Generation,
    LoadRequest,
    Registration,
    RegistrationCounts,
    RegistryJob,
    UnloadResult,
)
from app.deployments.registry.pins import Pins
from app.deployments.rpc.actor_proxy import remote_method
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.store.tier_counters import STORE_TIERS, Tier
from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterQuarantined, CombinationError, NotReady, PolyloraError
from app.logging import LogEvent

if TYPE_CHECKING:  # processes that only call it need no database package
    from app.deployments.registry.jobs.auto_registration import AutoRegistration
    from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
    from app.deployments.registry.jobs.preload import Preloader
    from app.deployments.registry.registry import Registry
    from app.deployments.registry.service import RegistryService
    from app.deployments.store.host_cache import HostAdapterCache
    from app.deployments.store.uploads import Uploads

logger = logging.getLogger(__name__)

H = TypeVar("H")
M = TypeVar("M", bound=Callable[..., Awaitable[Any]])

#: How long a fetch may wait here, and how many may wait at a time; the others are answered at once.
FETCH_WAIT_S = 0.5
MAX_WAITING_FETCHES = 100
#: Prefetches at a time; more are ignored, which costs only time.
MAX_PREFETCHES = 1000


def store_method(method: M) -> M:
    """Allow other processes to call this method of `StoreService`; each call runs `on_call` first."""

    @wraps(method)
    async def call(service: StoreService[Any], *args: Any, **options: Any) -> Any:
        service.on_call()
        return await method(service, *args, **options)

    return remote_method(cast(M, call))


class StoreParts(NamedTuple, Generic[H]):
    """The parts of the store (`factory.ConfiguredStore`). `apply_settings` applies other settings, given as JSON."""

    registry: Registry
    registry_service: RegistryService
    host_cache: HostAdapterCache[H]
    preloader: Preloader
    lazy_registrations: LazyRegistrations
    auto_registration: AutoRegistration
    uploads: Uploads
    apply_settings: Callable[[str], Awaitable[None]]


class StoreService(Generic[H]):
    """One event loop. `on_call` runs at each call of a `store_method`."""

    def __init__(self, parts: StoreParts[H], on_call: Callable[[], None]) -> None:
        self._parts = parts
        self._registry = parts.registry
        self._registry_service = parts.registry_service
        self._host_cache = parts.host_cache
        self._uploads = parts.uploads
        self.on_call = on_call
        self._num_waiting = 0
        self._prefetching = Tasks()

    @store_method
    async def preload(self, settings: str | None = None) -> None:
        """Apply the settings of a service that starts, and load the adapters that they name.

        Done once however many ingresses call. Raises what makes an adapter fail, and ConfigError for invalid settings.
        """
        self._registry_service.start()
        if settings is not None:
            await self._parts.apply_settings(settings)
        await self._parts.preloader.preload()

    @store_method
    async def load(self, request: LoadRequest) -> RegistryJob:
        """Start to load an adapter. Raises InvalidRequest, UnsafeSource."""
        return await self._registry_service.load(request)

    @store_method
    async def load_and_wait(self, request: LoadRequest) -> tuple[RegistryJob, CatalogEntry]:
        """Load an adapter; every ingress serves it when this returns. Raises what made the load fail."""
        return await self._registry_service.load_and_wait(request)

    @store_method
    async def register(self, registrations: Sequence[Registration], *, tenant_id: str, who: str) -> RegistrationCounts:
        """Register names lazily: all, or none. Raises InvalidRequest, UnsafeSource, QueueFull."""
        return await self._parts.lazy_registrations.register(registrations, tenant_id=tenant_id, who=who)

    @store_method
    async def load_registered(self, name: str, *, tenant_id: str, who: str) -> tuple[RegistryJob | None, CatalogEntry]:
        """Load a lazily registered name; no job if it is loaded. Raises NotFound and what made the load fail."""
        return await self._parts.lazy_registrations.load_registered(name, tenant_id=tenant_id, who=who)

    @store_method
    async def load_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        """`load_registered` for a client. Raises AdapterUnreadable, which names no place of the server."""
        await self._parts.lazy_registrations.load_for_request(name, tenant_id=tenant_id, who=who)

    @store_method
    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:
        """Look up an unregistered name; True once every ingress serves it. Raises what reading raises."""
        return await self._parts.auto_registration.resolve(name, tenant_id=tenant_id, who=who)

    @store_method
    async def begin_upload(self, request: LoadRequest, config: bytes) -> str:
        """Start to upload an adapter, with its adapter_config.json; the upload's id.

        Raises InvalidRequest for the name, AdapterTooLarge or QueueFull if the files do not fit.
        """
        self._registry_service.check_name(request.name)  # before the files are written
        return await asyncio.to_thread(self._uploads.begin, config, request.tenant_id)

    @store_method
    async def write_upload(self, upload_id: str, offset: int, part: bytes) -> None:
        """Add a part of its weights. Raises AdapterTooLarge, QueueFull, and NotReady if it was interrupted."""
        await asyncio.to_thread(self._uploads.write, upload_id, offset, part)

    @store_method
    async def end_upload(self, request: LoadRequest, upload_id: str) -> tuple[RegistryJob, CatalogEntry]:
        """`load_and_wait` of an upload that is complete; the request's source is ignored.

        Raises what `load_and_wait` raises, QueueFull, and NotReady if the upload was interrupted.
        """
        with ExitStack() as stack:
            source = await asyncio.to_thread(stack.enter_context, self._uploads.end(upload_id))
            return await self._registry_service.load_and_wait(replace(request, source=source))

    @store_method
    async def discard_upload(self, upload_id: str) -> None:
        """Remove an upload that will not be completed."""
        await asyncio.to_thread(self._uploads.discard, upload_id)

    @store_method
    async def begin_unload(self, name: str, *, tenant_id: str, who: str) -> tuple[UnloadResult, CatalogEntry | None]:
        """Take a name out of service; `end_unload` follows once its rows are free. Raises NotFound, AdapterBusy."""
        return await self._registry_service.unloads.begin(name, tenant_id=tenant_id, who=who)

    @store_method
    async def end_unload(self, unload: UnloadResult) -> RegistryJob:
        """No device has rows of it any more: free the host copy and end the job."""
        return await self._registry_service.unloads.end(unload)

    @store_method
    async def orphaned_unloads(self, own_ids: Collection[str]) -> list[UnloadResult]:
        """Unloads without an ingress, for the caller to end; `own_ids`: jobs that it already works on."""
        return await self._registry_service.unloads.orphaned_unloads(own_ids)

    @store_method
    async def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        return await asyncio.to_thread(self._registry.catalog.is_used, digest)

    @store_method
    async def unreferenced_digests(self, digests: Collection[str]) -> list[str]:
        """The digests that names have meant and none means any more."""
        return await self._registry_service.unloads.unreferenced_digests(digests)

    @store_method
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
        """Change the settings of a name (None: unchanged). Raises NotFound, AdapterTooLarge for a pin that does not
        fit.
        """
        return await self._registry_service.configure(
            name,
            tenant_id=tenant_id,
            who=who,
            pinned=pinned,
            traffic_weight=traffic_weight,
            description=description,
            defaults=defaults,
        )

    @store_method
    async def put_alias(self, name: str, targets: Mapping[str, float], *, tenant_id: str, who: str) -> AliasEntry:
        """Set an alias's targets and weights. Raises InvalidRequest, NotFound."""
        return await self._registry_service.change_alias(
            name, tenant_id, lambda aliases: aliases.put(name, targets, tenant_id=tenant_id, who=who)
        )

    @store_method
    async def promote_alias(self, name: str, target: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Send all of an alias's requests to one of its targets. Raises InvalidRequest, NotFound."""
        return await self._registry_service.change_alias(
            name, tenant_id, lambda aliases: aliases.promote(name, target, tenant_id=tenant_id, who=who)
        )

    @store_method
    async def roll_back_alias(self, name: str, version: int | None, *, tenant_id: str, who: str) -> AliasEntry:
        """Restore a version; None: the one before the last change. Raises InvalidRequest, NotFound."""
        return await self._registry_service.change_alias(
            name, tenant_id, lambda aliases: aliases.rollback(name, version, tenant_id=tenant_id, who=who)
        )

    @store_method
    async def remove_alias(self, name: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Remove an alias. Raises NotFound."""
        return await self._registry_service.change_alias(
            name, tenant_id, lambda aliases: aliases.remove(name, tenant_id=tenant_id, who=who)
        )

    @store_method
    async def alias_versions(self, name: str, *, tenant_id: str) -> list[AliasVersion]:
        """All versions of an alias, newest first. Raises NotFound."""
        return await asyncio.to_thread(self._registry.aliases.versions, name, tenant_id=tenant_id)

    @store_method
    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name without an entry or job."""
        return await self._registry_service.describe(name, tenant_id=tenant_id)

    @store_method
    async def job(self, job_id: str, *, tenant_id: str) -> RegistryJob:
        """A job in its present state. Raises NotFound."""
        return await self._registry_service.job(job_id, tenant_id=tenant_id)

    @store_method
    async def generations(self, name: str, *, tenant_id: str) -> list[Generation]:
        """All generations of a name, newest first."""
        return await asyncio.to_thread(self._registry.catalog.generations, name, tenant_id=tenant_id)

    @store_method
    async def events(
        self,
        name: str | None,
        *,
        limit: int,
        before: str | None,
        tenant_id: str,
        only: frozenset[str] | None = None,
    ) -> list[Event]:
        """Events, newest first; `before` is the id of the last record of the previous page; `only`: these events."""
        event_log = self._registry.event_log
        return await asyncio.to_thread(
            event_log.events, name, limit=limit, before=before, tenant_id=tenant_id, only=only
        )

    @store_method
    async def audit(self, name: str | None, *, limit: int, before: str | None, tenant_id: str) -> list[AuditRecord]:
        """Audit records, newest first; `before` as in `events`."""
        event_log = self._registry.event_log
        return await asyncio.to_thread(event_log.audit, name, limit=limit, before=before, tenant_id=tenant_id)

    @store_method
    async def record_audit(self, who: str, action: str, name: str, *, tenant_id: str) -> None:
        """Record a management call that changes nothing in the registry."""
        await asyncio.to_thread(self._registry.event_log.record_audit, who, action, name, tenant_id=tenant_id)

    @store_method
    async def hot(self, limit: int) -> list[CatalogEntry]:
        """Adapters that a new replica should load before it is ready, besides the pinned ones: the hottest first."""
        return await self._registry_service.hot(limit)

    @store_method
    async def stats(self) -> dict[Tier, dict[str, float]]:
        """The counters of the store's tiers."""
        return {tier: self._host_cache.counts.of(tier) for tier in STORE_TIERS}

    @store_method
    async def host_digests(self) -> tuple[str, ...]:
        """The adapters in host memory."""
        return self._host_cache.cached_digests

    @store_method
    async def fetch(self, ref: AdapterRef, again: bool = False) -> H | None:
        """The packed adapter with this digest, or None while it is being read. Raises AdapterUnreadable if it cannot be
        read.

        The error is for clients and names no place of this server; the log and `describe` have the cause. `again`: this
        caller has received None before. Replicas wait with `replica.adapter_fetcher.fetch_packed`.
        """
        wait_s = FETCH_WAIT_S if self._num_waiting < MAX_WAITING_FETCHES else 0.0
        self._num_waiting += 1
        try:
            return await self._host_cache.try_fetch(ref, wait_s, again=again)
        except (NotReady, CombinationError):
            raise
        except PolyloraError as error:
            if not isinstance(error, AdapterQuarantined):  # it was tried just now: log the cause
                known = {"name": ref.name, "tenant": ref.tenant_id, "digest": ref.digest[:12]}
                logger.warning(LogEvent("adapter cannot be read", **known, reason=str(error)))
            raise unreadable_error(ref.name, error) from None
        finally:
            self._num_waiting -= 1

    @store_method
    async def prefetch(self, ref: AdapterRef) -> None:
        """Start the read that `fetch` will need soon; `fetch` meets its failure."""
        if len(self._prefetching) < MAX_PREFETCHES:
            self._prefetching.start(self._host_cache.prefetch(ref))

    @store_method
    async def invalidate(self, digest: str) -> None:
        """A fetched handle no longer resolves: read the adapter again."""
        self._host_cache.invalidate(digest)

    @store_method
    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        """Record what a replica's device loaded and unloaded, and when requests last used which digests (Unix time)."""
        await self._registry_service.observe(replica_id, loaded, unloaded, used_s)

    @store_method
    async def watch(
        self, known: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Entry]] | None:
        """Long poll: the next page of the registry's table after version `known`; None after `timeout_s`."""
        self._registry_service.start()
        self._registry_service.change_feed.check_version(known)
        return await self._registry_service.change_feed.table.newer(known, watcher_id, timeout_s)

    @store_method
    async def watch_pins(self, known: Version | None, watcher_id: str, timeout_s: float) -> tuple[Version, Pins] | None:
        """Long poll: the pinned adapters once they differ from version `known`; None after `timeout_s`."""
        self._registry_service.change_feed.check_version(known)
        return await self._registry_service.change_feed.pins.newer(known, watcher_id, timeout_s)

    @store_method
    async def watch_traffic_shares(
        self, known: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[str, float]] | None:
        """Long poll: the changes of the traffic shares after version `known`; None after `timeout_s`."""
        self._registry_service.change_feed.check_version(known)
        return await self._registry_service.change_feed.shares.newer(known, watcher_id, timeout_s)
