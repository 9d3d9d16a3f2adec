"""The adapter store as a named actor: the registry, and the machine's copies of the adapters.

In: the service's configuration, calls from every ingress and replica. Out: answers, and the registry's table published
to whoever watches, so that no request waits for this actor. It starts empty after a crash and fills again from its
database and the adapters' sources. When nobody watches any more, it ends (`attendance`).
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
from app.deployments.rpc.named_actor import NamedActor, exit_actor
from app.deployments.store.metrics import TierMetrics
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.adapter_stats import AdapterStatsTable
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.logging import start_log

#: The resource that Ray gives to the node of its head, and to no other.
HEAD_NODE = "node:__internal_head__"


class AdapterStoreActor(StoreService[SharedAdapter]):
    """`StoreService` with Ray's object store for host memory; it leaves when nobody watches any more."""

    def __init__(self, config_json: str, logs_json: str) -> None:
        start_log(LogsConfig.model_validate_json(logs_json), "store")
        from app.deployments.object_storage.storage import Storage
        from app.deployments.store.factory import OpenStore  # heavy: only this process needs it
        from app.deployments.tenancy.metrics import AdapterGauges, TenantGauges
        from app.deployments.tenancy.tenant_store import TenantStore

        adapters = AdapterStatsTable(time.time)
        counts = TierMetrics(adapters.record_load)
        actor_id = ray.get_runtime_context().get_actor_id() or ""
        parts = OpenStore(AppConfig.model_validate_json(config_json), _put, _held, counts, actor=actor_id).parts
        super().__init__(parts, self._stay)
        self._tenants = TenantsService(TenantStore(parts.registry.database), self._stay, adapters=adapters)
        self._kept = StorageService(lambda: Storage(parts.registry.database))
        self._attendance = IdleShutdown(exit_actor)
        self._gauges = (*counts.gauges, TenantGauges(self._tenants.throughput), AdapterGauges(adapters))
        self._repeating: asyncio.Task[None] | None = None

    async def tenants(self, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """A call of `TenantsService`, which lives here beside the registry and its database."""
        return await find_remote_method(self._tenants, method)(*args, **options)

    async def storage(self, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """A call of `StorageService`, which lives here beside the registry and its database."""
        return await find_remote_method(self._kept, method)(*args, **options)

    def _stay(self) -> None:
        self._attendance.here()
        if self._repeating is None:
            self._repeating = asyncio.create_task(repeat_gauges(self._gauges))


def store_actor(config: AppConfig) -> NamedActor:
    """One per cluster and registry; a service with other settings tells it those (`StoreService.preload`).

    A registry in a file is on one machine: the store runs on the head node, wherever it was asked for.
    """
    resources = {HEAD_NODE: 0.001} if registry_place(config.adapters).startswith("file ") else {}
    logs = config.logs.model_dump_json()
    return NamedActor(store_name(config), AdapterStoreActor, store_settings(config), logs, resources=resources)


def store_service(actor: NamedActor) -> StoreService[SharedAdapter]:
    """The store, as other processes call it."""
    return actor_proxy(StoreService[SharedAdapter], actor)


def tenants_service(actor: NamedActor) -> TenantsService:
    """The owner of tenants, which lives in the store's actor."""
    return actor_proxy(TenantsService, actor, AdapterStoreActor.tenants)


def storage_service(actor: NamedActor) -> StorageService:
    """What is kept for clients, which lives in the store's actor."""
    return actor_proxy(StorageService, actor, AdapterStoreActor.storage)


def store_settings(config: AppConfig) -> str:
    """What the store is made with, and told by a service that starts."""
    return config.for_store.model_dump_json()


def store_name(config: AppConfig) -> str:
    """The actor's."""
    return f"adapter-store-{config.store_key}"


def _put(packed: PackedAdapter) -> SharedAdapter:
    return SharedAdapter(packed.header, [ray.put(array) for array in packed.arrays])


def _held(shared: SharedAdapter) -> PackedAdapter:
    return PackedAdapter(shared.header, [ray.get(array) for array in shared.arrays])
