"""The registry's process without Ray: a registry service over a store that reads from a dictionary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from app.deployments.object_storage.service import StorageService
from app.deployments.object_storage.storage import Storage
from app.deployments.registry.catalog import Catalog
from app.deployments.registry.db.database import sqlite_url
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.jobs.auto_registration import AutoRegistration, ResolverSettings
from app.deployments.registry.jobs.failure_backoff import Failure, FailureBackoff
from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
from app.deployments.registry.jobs.preload import Preloader
from app.deployments.registry.models import (
    DEFAULT_TENANT,
    UPLOADED,
    CatalogEntry,
    LoadRequest,
    ReadAdapter,
    RegistryJob,
    State,
)
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.registry.tier_events import TierEvents
from app.deployments.rpc.actor_proxy import actor_proxy
from app.deployments.rpc.long_poll_host import Version
from app.deployments.rpc.named_actor import NamedActor
from app.deployments.store.service import StoreParts, StoreService
from app.deployments.store.tier_counters import TierCounters
from app.deployments.store.uploads import Uploads
from app.deployments.tenancy.auth.project_store import AdapterQuota
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.tenant_store import TenantStore
from app.deployments.tenancy.usage.traffic_history import TrafficHistory
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.combining.combination import is_combination
from app.engine.errors import NotFound, PolyloraError, UnsafeSource
from tests.deployments.placed import Placed


def card(digest: str) -> AdapterCard:
    return AdapterCard(digest, "base", 8, ("q_proj",), "float32", 64)


#: Whose names they are; and with whoever asks.
MINE = {"tenant_id": DEFAULT_TENANT}
ADA = MINE | {"who": "ada"}


def wanted(name: str, source: str, pinned: bool | None = None, traffic_weight: float | None = None) -> LoadRequest:
    return LoadRequest(DEFAULT_TENANT, name, source, "ada", pinned, traffic_weight)


def complete_upload(uploads: Uploads, config: bytes, weights: bytes, tenant_id: str = DEFAULT_TENANT) -> Any:
    """The context of an upload's source, all of which has arrived."""
    upload_id = uploads.begin(config, tenant_id)
    try:
        for offset in range(0, len(weights), 7):
            uploads.write(upload_id, offset, weights[offset : offset + 7])
    except PolyloraError:
        uploads.discard(upload_id)
        raise
    return uploads.end(upload_id)


async def upload(
    service: StoreService[Any], request: LoadRequest, config: bytes, weights: bytes
) -> tuple[RegistryJob, CatalogEntry]:
    """Like PUT /v1/loras/{name}/weights."""
    upload_id = await service.begin_upload(request, config)
    await service.write_upload(upload_id, 0, weights)
    return await service.end_upload(request, upload_id)


def register(
    catalog: Catalog,
    name: str,
    uri: str,
    digest: str,
    *,
    tenant_id: str,
    who: str,
    pinned: bool | None = None,
    traffic_weight: float | None = None,
    source: str | None = None,
    job: RegistryJob | None = None,
    **facts: Any,
) -> CatalogEntry:
    """`Catalog.register` of contents with these facts."""
    request = LoadRequest(tenant_id, name, uri if source is None else source, who, pinned, traffic_weight)
    return catalog.register(request, uri, replace(card(digest), **facts), job)


class Here(NamedActor):
    """An actor in this process."""

    def __init__(self, callee: object) -> None:
        super().__init__("here", type(callee))
        self._callee = callee

    async def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await getattr(self._callee, method.__name__)(*args, **options)


class FakeStore:
    """`contents` maps a source to a digest, or to the error that reading it raises; `gates` hold readers up.

    `texts` maps a digest to what the adapter says about text, `invocations` to the tokens that activate it, `metadata`
    to what its card says beside the description, as JSON; `score_heads` are the digests of those that score.
    """

    def __init__(self) -> None:
        self.contents: dict[str, str | Exception] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.texts: dict[str, str] = {}
        self.invocations: dict[str, tuple[int, ...]] = {}
        self.metadata: dict[str, str] = {}
        self.score_heads: set[str] = set()
        self.loads: list[str] = []
        self.cached_digests: set[str] = set()
        self.pinned: list[set[str]] = []
        self.on_read: Callable[[str, State], None] = lambda *_: None
        self.failures: dict[str, Failure] = {}  # digests that could not be read for a request
        self.counts = TierCounters()

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:  # noqa: ARG002
        self.loads.append(source)
        self.on_read(source, State.VALIDATING)
        if source in self.gates:
            await self.gates[source].wait()
        if ".." in source:
            raise UnsafeSource(f"{source!r} leaves the roots")
        found = self.contents.get(source, NotFound(f"there is no adapter at {source!r}"))
        if isinstance(found, Exception):
            raise found
        self.on_read(source, State.ON_DISK)
        await asyncio.sleep(0)  # the registry service notes it before it gets the result, as from a thread
        self.cached_digests.add(found)
        uri = source if is_combination(source) or source.startswith(UPLOADED) else f"/roots/{source}"
        facts: dict[str, Any] = {"text": self.texts.get(found, ""), "metadata": self.metadata.get(found, "")}
        facts["has_score_head"] = found in self.score_heads
        return ReadAdapter(uri, replace(card(found), invocation_tokens=self.invocations.get(found, ()), **facts))

    def host(self, source: str) -> str:
        return source.rpartition("/")[0]

    async def prefetch(self, ref: AdapterRef) -> None:
        """What is read ahead makes no difference here."""

    def failure(self, ref: AdapterRef) -> Failure | None:
        return self.failures.get(ref.digest)

    def invalidate(self, digest: str) -> None:
        self.cached_digests.discard(digest)

    def pin(self, digests: Collection[str]) -> None:
        self.pinned.append(set(digests))


class ManagedStore:
    """The store's service in this process, its client, and one ingress' copy of its table."""

    def __init__(
        self,
        registry: Registry,
        store: FakeStore,
        clock: Callable[[], float] = time.time,
        uploads: Uploads | None = None,
    ) -> None:
        self.uploads = uploads
        self.registry, self.store = registry, store
        registry.catalog.check_quota = AdapterQuota(registry.database.base_digest)
        self.events = TierEvents()
        store.on_read = self.events.on_progress
        self.registry_service = RegistryService(registry, store, self.events, clock=clock)
        self.resolution = AutoRegistration(
            registry, store, self.registry_service, FailureBackoff(clock), ResolverSettings(), clock
        )
        self.unread = LazyRegistrations(registry, self.registry_service, FailureBackoff(clock))
        parts = StoreParts(
            registry,
            self.registry_service,
            store,
            Preloader(registry, self.registry_service),
            self.unread,
            self.resolution,
            cast(Any, uploads),
            apply_settings=cast(Any, None),
        )
        self.client = actor_proxy(StoreService[Any], Here(StoreService(parts, lambda: None)))
        self.view = RegistryView()
        self.registry_service.start()
        self.clock = clock
        self.books = TenantStore(registry.database)
        self.tenants_client = actor_proxy(TenantsService, Here(TenantsService(self.books, lambda: None, clock)))
        self.traffic = TrafficHistory(clock)
        self.monotonic: Callable[[], float] = time.monotonic  # asked for when something is first kept
        self.storage = actor_proxy(
            StorageService, Here(StorageService(lambda: Storage(registry.database, self.monotonic)))
        )
        self.tenants = TenantMirror()
        self.followers = [asyncio.create_task(work) for work in (self._follow(), self._follow_tenants())]
        self.dropped: list[tuple[str, str]] = []
        self.drop_errors: dict[str, Exception] = {}  # replica id -> what dropping there raises
        self.drop_gate = asyncio.Event()
        self.drop_gate.set()
        self.placement = Placed()

    @classmethod
    def at(cls, folder: Path) -> ManagedStore:
        registry = Registry(sqlite_url(folder / "registry.sqlite"), "base", base_names=("base",))
        return cls(registry, FakeStore(), uploads=Uploads(folder / "uploads", 1 << 20, time.monotonic))

    async def unload_adapter(self, replica_id: str, digest: str) -> int:
        await self.drop_gate.wait()
        if replica_id in self.drop_errors:
            raise self.drop_errors[replica_id]
        self.dropped.append((replica_id, digest))
        return 8

    async def kill(self) -> None:
        """The process is gone, and so long ago that others know. What it left in the database stays readable here."""
        await self.registry_service._tasks.close()
        await self.registry_service.loads._work.close()
        self.registry.stores.leave()

    async def close(self) -> None:
        self.resolution.close()
        self.unread.close()
        await self.registry_service.close()
        for follower in self.followers:
            follower.cancel()
        await asyncio.gather(*self.followers, return_exceptions=True)
        self.registry.close()

    async def _follow(self) -> None:
        held: Version | None = None
        while True:
            news = await self.registry_service.change_feed.table.newer(held, "ingress", 10.0)
            if news is not None:
                held, changes = news
                self.view.take(changes)

    async def _follow_tenants(self) -> None:
        held: Version | None = None
        while True:
            news = await self.tenants_client.watch(held, "ingress", 10.0)
            if news is not None:
                held, changes = news
                self.tenants.take(changes)


async def fails(work: Any) -> PolyloraError:
    """The error of our tree that an awaitable raises."""
    try:
        await work
    except PolyloraError as error:
        return error
    raise AssertionError("it did not fail")
