"""The adapter store as a named actor: the registry, the tenants, the object storage, and the machine's copies of
adapters.

Every ingress and replica calls it; the registry's table is published to watchers, so that no request waits for this
actor. After a crash it starts empty and refills from its database and the adapters' sources. Without watchers it shuts
down (`rpc.idle_shutdown`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray

from app.config import AppConfig, LogsConfig, registry_place
from app.deployments.object_storage.service import StorageService
from app.deployments.rpc.actor_proxy import actor_proxy, find_remote_method
from app.deployments.rpc.gauges import repeat_gauges
from app.deployments.rpc.idle_shutdown import IdleShutdown
from app.deployments.rpc.named_actor import FoundActor, NamedActor, exit_actor
from app.deployments.store.metrics import TierMetrics
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.adapter_stats import AdapterStatsTable
from app.deployments.tenancy.usage.traffic_history import TrafficHistory
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.logging import start_log

#: A resource that only Ray's head node has.
HEAD_NODE = "node:__internal_head__"


class AdapterStoreActor(StoreService[SharedAdapter]):
    """`StoreService` with Ray's object store as host memory; shuts down when no process watches it any more."""

    def __init__(self, config_json: str, logs_json: str) -> None:
        start_log(LogsConfig.model_validate_json(logs_json), "store")
        from app.deployments.object_storage.storage import Storage
        from app.deployments.store.factory import ConfiguredStore  # slow to import
        from app.deployments.tenancy.metrics import AdapterGauges, TenantGauges
        from app.deployments.tenancy.tenant_store import TenantStore

        adapters = AdapterStatsTable(time.time)
        counts = TierMetrics(adapters.record_load)
        actor_id = ray.get_runtime_context().get_actor_id() or ""
        parts = ConfiguredStore(AppConfig.model_validate_json(config_json), _put, _get, counts, actor=actor_id).parts
        super().__init__(parts, self._keep_alive)
        self._tenants = TenantsService(TenantStore(parts.registry.database), self._keep_alive, adapters=adapters)
        self._storage = StorageService(lambda: Storage(parts.registry.database))
        self._traffic = TrafficHistory()
        self._idle_shutdown = IdleShutdown(exit_actor)
        self._gauges = (*counts.gauges, TenantGauges(self._tenants.throughput), AdapterGauges(adapters))
        self._repeating: asyncio.Task[None] | None = None

    async def tenants(self, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Call a method of `TenantsService`."""
        return await find_remote_method(self._tenants, method)(*args, **options)

    async def storage(self, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Call a method of `StorageService`."""
        return await find_remote_method(self._storage, method)(*args, **options)

    async def traffic(self, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Call a method of `TrafficHistory`."""
        return await find_remote_method(self._traffic, method)(*args, **options)

    def _keep_alive(self) -> None:
        self._idle_shutdown.touch()
        if self._repeating is None:
            self._repeating = asyncio.create_task(repeat_gauges(self._gauges))


def store_actor(config: AppConfig) -> NamedActor:
    """One actor per cluster and registry; a service with other settings sends them with `StoreService.preload`.

    A registry in a file is on one machine, so the store then runs on the head node.
    """
    resources = {HEAD_NODE: 0.001} if registry_place(config.adapters).startswith("file ") else {}
    logs = config.logs.model_dump_json()
    return NamedActor(store_name(config), AdapterStoreActor, store_settings(config), logs, resources=resources)


def tenants_actor(config: AppConfig) -> NamedActor:
    """The store that has the projects, keys, usage and files: the base model's own, or the first base model's, which
    the ingresses of both create."""
    if config.tenants.base_uri is None:
        return store_actor(config)
    return FoundActor(f"adapter-store-{config.tenants_store_key}")


def store_service(actor: NamedActor) -> StoreService[SharedAdapter]:
    """The store, for other processes."""
    return actor_proxy(StoreService[SharedAdapter], actor)


def tenants_service(actor: NamedActor) -> TenantsService:
    """The tenants' service in the store's actor."""
    return actor_proxy(TenantsService, actor, AdapterStoreActor.tenants)


def storage_service(actor: NamedActor) -> StorageService:
    """The object storage in the store's actor."""
    return actor_proxy(StorageService, actor, AdapterStoreActor.storage)


def traffic_history(actor: NamedActor) -> TrafficHistory:
    """The last hour's traffic in the store's actor."""
    return actor_proxy(TrafficHistory, actor, AdapterStoreActor.traffic)


def store_settings(config: AppConfig) -> str:
    """The settings that the store is created with, and that each service sends when it starts."""
    return config.for_store.model_dump_json()


def store_name(config: AppConfig) -> str:
    """The actor's name."""
    return f"adapter-store-{config.store_key}"


def _put(packed: PackedAdapter) -> SharedAdapter:
    return SharedAdapter(packed.header, [ray.put(array) for array in packed.arrays])


def _get(shared: SharedAdapter) -> PackedAdapter:
    return PackedAdapter(shared.header, [ray.get(array) for array in shared.arrays])
