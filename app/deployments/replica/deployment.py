"""The engine as a Serve deployment: a thin shell over `EngineService`.

In: `submit` and `frames` calls steered to exactly this replica. Out: frames of chunks. The adapter comes
from the store through shared memory. Placement hears where adapters are as soon as they move. A failed
engine fails the health check, and Serve replaces the replica. Draining needs nothing special: readers
end when they have no requests left, and Serve waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from ray import serve

from app.config import AppConfig
from app.deployments.links.frames import pack_frame
from app.deployments.links.placement_client import PlacementClient
from app.deployments.links.ray_calls import ActorAway, held
from app.deployments.links.sockets import FrameSocket
from app.deployments.links.store_client import StoreClient
from app.deployments.links.watched import WATCH_TIMEOUT_S, Watched
from app.deployments.placement.actor import placement_actor
from app.deployments.registry.entries import CatalogEntry
from app.deployments.registry.pins import Pins
from app.deployments.registry.shares import Shares
from app.deployments.replica.metrics import DeviceMetrics, EngineMetrics
from app.deployments.replica.pins import PinKeeper
from app.deployments.replica.service import EngineService
from app.deployments.replica.warm_up import bring_adapters, hottest_that_fit
from app.deployments.store.actor import store_actor
from app.deployments.store.metrics import TierMetrics
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.isolation.packing import unpack_adapter
from app.engine.adapters.lora import LoraAdapter
from app.engine.config import EngineConfig
from app.engine.errors import EngineFailure, NotReady
from app.engine.interface import RunningEngine
from app.engine.models.checkpoint import open_model
from app.engine.open import open_engine
from app.engine.request import GenerateRequest

logger = logging.getLogger(__name__)

#: Reports are at least this far apart, however fast adapters move.
MIN_REPORT_INTERVAL_S = 0.05
#: How often the registry hears of use: a hot set that is this old after a crash is as good.
OBSERVE_INTERVAL_S = 1.0
#: How long a new replica waits for the sources of pinned adapters and of the hot set.
WARM_TIMEOUT_S = 60.0
#: How often a pinned adapter that could not be brought here is tried again, and placement reminded of the shares.
STEER_INTERVAL_S = 5.0


class EngineReplica:
    """One base model in memory, its adapters and its requests."""

    async def __init__(self, config_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        config = AppConfig.model_validate_json(config_json)
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._store = StoreClient(store_actor(config))
        self._placement = PlacementClient(placement_actor(config, context.app_name))
        self._report_interval_s = config.placement.report_interval_s
        self._service = EngineService(self._fetch)
        self._socket = FrameSocket(self._replica_id)
        checkpoint = await asyncio.to_thread(open_model, config.model.uri, config.model.name)
        loop = asyncio.get_running_loop()

        def failed(_: EngineFailure) -> None:
            loop.call_soon_threadsafe(self._service.changed.set)  # a report is due: the last one

        self._engine = await asyncio.to_thread(open_engine, checkpoint, config.engine, self._service.on_step, failed)
        await asyncio.to_thread(self._engine.warm_up)
        self._service.start(self._engine)
        self._engine.start()
        self._pinned = Watched(self._store.watch_pins, self._replica_id, Pins())
        pinned = await self._store.watch_pins(None, self._replica_id, WATCH_TIMEOUT_S)
        assert pinned is not None, "there is always news for whoever holds nothing"
        self._pinned.take(*pinned)
        shares: Shares = {}
        self._shares = Watched(self._store.watch_shares, self._replica_id, shares)
        await self._warm_adapters(self._engine, config.engine)
        self._metrics = EngineMetrics(), DeviceMetrics(TierMetrics(), checkpoint.spec)
        await self._socket.open()
        self._pins = PinKeeper(self._engine, self._fetch, self._brought)
        forever = (
            self._report_forever(),
            self._observe_forever(),
            self._pin_forever(),
            self._steer_forever(),
            self._pinned.follow(),
            self._shares.follow(),
        )
        self._reporters = [loop.create_task(work) for work in forever]

    async def frames(
        self, link_id: str, by_socket: bool = False, target_replica_id: str | None = None
    ) -> AsyncGenerator[bytes]:
        """A reader attaches; its first frame is empty. `by_socket`: the others go through its connection to ours."""
        self._must_be(target_replica_id)
        leave = partial(self._service.leave, link_id)
        async with aclosing(self._service.frames(link_id)) as frames:
            alone = (pack_frame(frame) async for frame in frames)
            async with aclosing(self._socket.carry(link_id, frames, leave) if by_socket else alone) as items:
                async for item in items:
                    yield item

    async def submit(
        self, link_id: str, requests: Sequence[GenerateRequest], target_replica_id: str | None = None
    ) -> bool:
        self._must_be(target_replica_id)
        return self._service.submit(link_id, requests)

    async def abort(self, request_ids: Sequence[str], target_replica_id: str | None = None) -> None:
        self._must_be(target_replica_id)
        self._service.abort(request_ids)

    async def drop_adapter(self, digest: str, target_replica_id: str | None = None) -> int:
        """Free an adapter's rows when its last sequence has ended; returns how many rows were freed."""
        self._must_be(target_replica_id)
        self._service.unmap(digest)
        return await asyncio.wrap_future(self._engine.drop_adapter(digest))

    async def stats(self, target_replica_id: str | None = None) -> dict[str, Any]:
        """Counts for tests and operators."""
        self._must_be(target_replica_id)
        stats = self._engine.stats()
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            "num_socket_links": self._socket.num_connections,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting + self._service.num_waiting_for_adapters,
            "num_blocks": stats.num_blocks,
            "num_blocks_free": stats.num_blocks_free,
            "num_rank_rows_free": stats.num_rank_rows_free,
            "residents": tuple(resident.digest for resident in stats.residents),
            "in_use": tuple(resident.digest for resident in stats.residents if resident.num_refs),
            "num_adapter_hits": stats.num_adapter_hits,
            "num_adapter_misses": stats.num_adapter_misses,
            "num_adapter_writes": stats.num_adapter_writes,
            "num_tokens_generated": stats.num_tokens_generated,
            "num_aborted": stats.num_aborted,
        }

    def check_health(self) -> None:
        if self._engine.failure is not None:
            raise self._engine.failure
        for reporter in self._reporters:
            if reporter.done():
                raise RuntimeError("the replica no longer reports") from reporter.exception()

    async def __del__(self) -> None:
        for reporter in self._reporters:
            reporter.cancel()
        self._pins.close()
        self._socket.close()
        await asyncio.to_thread(self._engine.stop, 10.0)

    def _must_be(self, target_replica_id: str | None) -> None:
        if target_replica_id is not None and target_replica_id != self._replica_id:
            raise NotReady(f"meant for replica {target_replica_id} but reached {self._replica_id}")

    async def _fetch(self, ref: AdapterRef) -> LoraAdapter:
        """The adapter as views of shared memory. Lost memory (its owner died, it was evicted) is read again."""
        try:
            return await self._fetch_once(ref)
        except ActorAway as error:
            logger.info("adapter %s: asking the store again: %s", ref.name, error)
        await asyncio.sleep(1.0)  # a store that restarts needs about two seconds; Ray queues the call meanwhile
        try:
            await self._store.lost(ref.digest)
            return await self._fetch_once(ref)
        except ActorAway as error:
            raise NotReady(
                f"adapter {ref.name!r} cannot be had while the adapter store restarts; ask again", retry_after_s=2
            ) from error

    async def _fetch_once(self, ref: AdapterRef) -> LoraAdapter:
        header, refs = await self._store.fetch(ref)
        arrays = [await held(object_ref) for object_ref in refs]
        return unpack_adapter(header, arrays)

    async def _warm_adapters(self, engine: RunningEngine, config: EngineConfig) -> None:
        """Hold what is pinned, and then what was used last, before being called ready.

        An adapter that cannot be had, or no longer fits, is left to its requests, or to the pin keeper.
        """
        max_adapters = config.max_adapter_slots - 1
        pinned = self._pinned.value.digests
        engine.pin_adapters(pinned)
        hot: list[CatalogEntry] = []
        try:
            hot = await self._store.hot(max_adapters)
        except NotReady as error:
            logger.warning("nobody knows what was used last (%s); starting without it", error)
        entries = hottest_that_fit(
            [*self._pinned.value.entries, *(entry for entry in hot if entry.ref.digest not in pinned)],
            num_adapters=max_adapters,
            num_rank_rows=engine.stats().num_rank_rows,
            rank_alignment=config.rank_alignment,
            extra_bytes=config.adapter_extra_bytes,
        )
        if not entries:
            return
        fetches = [asyncio.create_task(self._fetch(entry.ref)) for entry in entries]
        await asyncio.wait(fetches, timeout=WARM_TIMEOUT_S)
        adapters: list[tuple[AdapterRef, LoraAdapter]] = []
        for entry, fetch in zip(entries, fetches, strict=True):
            if not fetch.done():
                fetch.cancel()
                logger.warning("adapter %s was not read within %g s; starting without it", entry.name, WARM_TIMEOUT_S)
            elif unread := fetch.exception():
                logger.warning("adapter %s cannot be read: %s", entry.name, unread)
            else:
                adapters.append((entry.ref, fetch.result()))
        for are_pinned in (True, False):
            part = [(ref, adapter) for ref, adapter in adapters if (ref.digest in pinned) is are_pinned]
            for ref, refusal in await bring_adapters(engine, part):
                logger.warning("adapter %s is not on the device: %s; starting without it", ref.name, refusal)
        for _, adapter in reversed(adapters):
            self._service.keep(adapter)

    async def _pin_forever(self) -> None:
        while True:
            pins = self._pinned.value
            self._pins.pin(pins)
            if self._pinned.value is pins:
                await self._pinned.changed(STEER_INTERVAL_S)

    async def _steer_forever(self) -> None:
        """Pass on to placement what traffic is expected."""
        while True:
            shares = self._shares.value
            try:
                await self._placement.steer(shares)
            except ActorAway as error:
                logger.warning("%s; telling placement the shares later", error)
            if self._shares.value is shares:
                await self._shares.changed(STEER_INTERVAL_S)

    def _brought(self, adapter: LoraAdapter) -> None:
        self._service.keep(adapter)
        self._service.changed.set()

    async def _observe_forever(self) -> None:
        """Tell the registry what came to and left the device, and what requests used: events and the hot set."""
        told: set[str] = set()
        used_s: dict[str, float] = {}
        while True:
            await asyncio.sleep(OBSERVE_INTERVAL_S)
            stats = self._engine.stats()
            for metrics in self._metrics:
                metrics.update(stats)
            resident = {item.digest for item in stats.residents}
            used_s |= self._service.take_used()
            if resident == told and not used_s:
                continue
            loaded, unloaded = sorted(resident - told), sorted(told - resident)
            try:
                await self._store.observe(self._replica_id, loaded, unloaded, used_s)
            except NotReady as error:
                logger.warning("the registry is away (%s); telling it later", type(error).__name__)
            else:
                told, used_s = resident, {}

    async def _report_forever(self) -> None:
        """Tell placement what is here: at once when it changed, at intervals otherwise.

        A failed engine's adapters would keep their homes here, so placement is told at once that it is gone.
        """
        while self._engine.failure is None:
            stats = self._engine.stats()
            resident = tuple(sorted(item.digest for item in stats.residents))
            report = self._service.report(self._replica_id, stats.num_running, stats.num_waiting, resident)
            try:
                await self._placement.report(report)
            except ActorAway as error:
                logger.warning("%s; reporting again", error)
            try:
                await asyncio.wait_for(self._service.changed.wait(), self._report_interval_s)
                await asyncio.sleep(MIN_REPORT_INTERVAL_S)
            except TimeoutError:
                pass
            self._service.changed.clear()
        with suppress(ActorAway):  # whoever is away hears no more reports, and forgets us
            await self._placement.gone(self._replica_id)
