"""The adapter store as a named actor: the registry, and the machine's copies of the adapters.

In: the service's configuration, calls from every ingress and replica. Out: answers, and the registry's table published
to whoever watches, so that no request waits for this actor. It starts empty after a crash and fills again from its
database and the adapters' sources. When nobody watches any more, it ends (`attendance`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from app.config import AppConfig
from app.deployments.links.attendance import Attendance
from app.deployments.links.gauges import repeat_gauges
from app.deployments.links.published import Changes, Version
from app.deployments.links.ray_calls import NamedActor, leave
from app.deployments.registry.entries import Generation
from app.deployments.registry.steering import Steering
from app.deployments.registry.view import Entry, Key
from app.deployments.store.counts import TIERS
from app.deployments.store.metrics import TierMetrics
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.isolation.packing import PackedAdapter


class AdapterStoreActor:
    """The registry and the machine's copies of the adapters (`Lifecycle`, `AdapterStore`)."""

    def __init__(self, config_json: str) -> None:
        # A database and whatever reads adapters: heavy, and every process that only calls this actor starts without.
        from app.deployments.registry.books import open_registry
        from app.deployments.registry.lifecycle import Lifecycle
        from app.deployments.store.library import open_library
        from app.deployments.store.store import AdapterStore
        from app.engine.adapters.lora import FEATURES
        from app.engine.models.checkpoint import open_model

        config = AppConfig.model_validate_json(config_json)
        checkpoint = open_model(config.model.uri, config.model.name)
        spec = checkpoint.spec
        counts = TierMetrics()
        registry = open_registry(config, spec.digest)
        pinned = {entry.ref.digest for entry in registry.catalog.pinned()}
        library = open_library(config.adapters, checkpoint, FEATURES, counts, held=pinned)

        def put(packed: PackedAdapter) -> tuple[Any, list[Any]]:
            return packed.header, [ray.put(array) for array in packed.arrays]

        self._attendance = Attendance(leave)
        self._store = AdapterStore(
            library,
            put,
            max_bytes=config.adapters.host_cache_bytes,
            policy=config.adapters.host_eviction,
            counts=counts,
            trusted=config.adapters.signing.trusted,
        )
        self._journal = registry.journal
        self._catalog = registry.catalog
        self._lifecycle = Lifecycle(registry, self._store, reserved_names=(config.model.name,))
        library.reached = self._lifecycle.reached
        library.disk.deleted = lambda digest: self._lifecycle.moved("deleted from disk", digest)
        self._store.moved = self._lifecycle.moved
        self._preload = config.adapters.preload
        self._preloading: asyncio.Task[None] | None = None
        self._gauges = counts.gauges
        self._repeating: asyncio.Task[None] | None = None

    async def manage(self, method: str, *args: Any, **options: Any) -> Any:
        """A method of `Lifecycle`. What it changes every ingress knows when it returns."""
        return await getattr(self._lifecycle, method)(*args, **options)

    async def journal(self, method: str, *args: Any, **options: Any) -> Any:
        """A method of `Journal`."""
        return await asyncio.to_thread(getattr(self._journal, method), *args, **options)

    async def generations(self, name: str, **options: Any) -> list[Generation]:
        return await asyncio.to_thread(self._catalog.generations, name, **options)

    async def preload(self) -> None:
        """Register the configured adapters, once however many ingresses ask."""
        self._lifecycle.resume()
        if self._preloading is None or (self._preloading.done() and self._preloading.exception() is not None):
            self._preloading = asyncio.create_task(self._register_all())
        await asyncio.shield(self._preloading)

    async def fetch(self, ref: AdapterRef) -> tuple[Any, list[Any]]:
        """(header, [object refs]): inside containers, or Ray would copy the weights into the answer."""
        return await self._store.fetch(ref)

    async def expect(self, ref: AdapterRef) -> None:
        """`fetch` will be asked for it soon."""
        await self._store.expect(ref)

    async def lost(self, digest: str) -> None:
        self._store.lost(digest)

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Entry]] | None:
        self._watched()
        self._lifecycle.resume()
        return await self._lifecycle.table.newer(held, watcher_id, timeout_s)

    async def watch_steering(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Steering] | None:
        self._watched()
        return await self._lifecycle.steering.newer(held, watcher_id, timeout_s)

    async def stats(self) -> dict[str, dict[str, float]]:
        return {tier: self._store.counts.of(tier) for tier in TIERS}

    def _watched(self) -> None:
        """Somebody watches: this actor stays, and says what it holds."""
        self._attendance.here()
        if self._repeating is None:
            self._repeating = asyncio.create_task(repeat_gauges(self._gauges))

    async def _register_all(self) -> None:
        loads = (self._lifecycle.load_and_wait(item.name, item.path, who="config") for item in self._preload)
        await asyncio.gather(*loads)


def store_actor(config: AppConfig) -> NamedActor:
    """One per cluster and what it is built from: a service with other settings never finds an older one's store."""
    return NamedActor(f"adapter-store-{config.store_key}", AdapterStoreActor, config.for_store.model_dump_json())
