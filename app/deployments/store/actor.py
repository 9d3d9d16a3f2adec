"""The two actors of a service, as thin shells: the adapter store and placement.

In: the service's configuration. Out: named actors that every replica of every deployment reaches. Both
start empty after a crash and become useful again by themselves: the store from its database and the
adapters' sources, placement from the next reports. What they hold is published to whoever watches, so
that no request waits for them; when nobody watches any more, they end (`attendance`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from app.config import AppConfig
from app.deployments.links.attendance import Attendance
from app.deployments.links.gauges import repeat_gauges
from app.deployments.links.published import Changes, Published, Version
from app.deployments.links.ray_calls import NamedActor, leave
from app.deployments.placement.books import PlacementBooks, PlacementTable, ReplicaReport, make_policy
from app.deployments.registry.entries import Generation
from app.deployments.registry.steering import Steering
from app.deployments.registry.view import Entry, Key
from app.deployments.store.counts import TIERS
from app.deployments.store.metrics import TierMetrics
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.isolation.packing import PackedAdapter
from app.engine.errors import NotReady

REBALANCE_INTERVAL_S = 1.0
#: By this much later than a report interval after placement's restart every replica has reported.
SETTLE_MARGIN_S = 0.5


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


class PlacementActor:
    """`PlacementBooks` with a clock.

    After a restart it says nothing until every replica had the time to report: ingresses keep the last table, which
    is better than one without the replicas that hold their adapters' rows.
    """

    def __init__(self, config_json: str) -> None:
        config = AppConfig.model_validate_json(config_json).placement
        self._books = PlacementBooks(make_policy(config), config.silence_s)
        self._published = Published(PlacementTable())
        self._settled_s = time.monotonic() + config.report_interval_s + SETTLE_MARGIN_S
        self._clock: asyncio.Task[None] | None = None
        self._attendance = Attendance(leave)

    async def report(self, report: ReplicaReport) -> None:
        self._attendance.here()
        self._start_clock()
        self._publish_if(self._books.report(report, time.monotonic()))

    async def steer(self, shares: Mapping[str, float]) -> None:
        """What part of the traffic adapters with more than the usual are expected to get; every replica says so."""
        self._publish_if(self._books.steer(shares))

    async def gone(self, replica_id: str) -> None:
        self._publish_if(self._books.gone(replica_id, time.monotonic()))

    async def assign(self, digests: Sequence[str]) -> tuple[Version, PlacementTable]:
        """Raises NotReady while replicas may be missing: a home that is given then is a wrong one."""
        if time.monotonic() < self._settled_s:
            raise NotReady("placement has just started", retry_after_s=1)
        self._publish_if(self._books.assign(digests))
        return self._published.current

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, PlacementTable] | None:
        self._attendance.here()
        self._start_clock()
        if held is not None and held.epoch != self._published.current[0].epoch:  # it has a table, of an earlier life
            await asyncio.sleep(self._settled_s - time.monotonic())
        return await self._published.newer(held, watcher_id, timeout_s)

    async def table(self) -> PlacementTable:
        return self._books.table

    def _publish_if(self, changed: bool) -> None:
        if changed:
            self._published.publish(self._books.table)

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = asyncio.create_task(self._run_clock())

    async def _run_clock(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            now_s = time.monotonic()
            changed = self._books.expire(now_s) | self._books.rebalance(now_s)
            self._publish_if(changed or self._books.table != self._published.current[1])


def store_actor(config: AppConfig) -> NamedActor:
    """One per cluster and what it is built from: a service with other settings never finds an older one's store."""
    return NamedActor(f"adapter-store-{config.store_key}", AdapterStoreActor, config.for_store.model_dump_json())


def placement_actor(config: AppConfig, app_name: str) -> NamedActor:
    """One per application: replicas of two services must not stand on one table."""
    return NamedActor(f"placement-{app_name}-{config.placement_key}", PlacementActor, config.model_dump_json())
