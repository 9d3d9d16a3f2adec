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
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, OwnerDiedError, RayActorError

from app.config import AppConfig
from app.deployments.actors import placement_actor, store_actor
from app.deployments.base_model import open_checkpoint
from app.deployments.engine_service import EngineService
from app.deployments.ray_calls import unwrapped
from app.deployments.warm_up import warm_up
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.lora import LoraAdapter
from app.engine.adapters.packing import unpack_adapter
from app.engine.engine import Engine
from app.engine.errors import NotReady
from app.engine.loading import load_backend
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.worker import EngineThread

logger = logging.getLogger(__name__)

#: Reports are at least this far apart, however fast adapters move.
MIN_REPORT_INTERVAL_S = 0.05


class EngineReplica:
    """One base model in memory, its adapters and its requests."""

    async def __init__(self, config_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        config = AppConfig.model_validate_json(config_json)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._store = store_actor(config)
        self._placement = placement_actor(config)
        self._report_interval_s = config.placement.report_interval_s
        self._service = EngineService(self._fetch)
        checkpoint = await asyncio.to_thread(open_checkpoint, config.model)
        self._backend = await asyncio.to_thread(load_backend, checkpoint, config.engine)
        engine = Engine(self._backend, config.engine)
        await asyncio.to_thread(warm_up, engine, checkpoint.spec, adapters=config.engine.adapter_rank_rows > 0)
        self._thread = EngineThread(engine, self._service.on_step)
        self._service.start(self._thread)
        self._thread.start()
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())

    async def frames(self, link_id: str, target_replica_id: str | None = None) -> AsyncGenerator[list[TokenChunk]]:
        """A reader attaches; its first frame is empty."""
        self._must_be(target_replica_id)
        async for frame in self._service.frames(link_id):
            yield frame

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
        return await asyncio.wrap_future(self._thread.drop_adapter(digest))

    async def stats(self, target_replica_id: str | None = None) -> dict[str, Any]:
        """Counts for tests and operators."""
        self._must_be(target_replica_id)
        stats = self._thread.stats()
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting + self._service.num_waiting_for_adapters,
            "num_blocks": stats.num_blocks,
            "num_blocks_free": stats.num_blocks_free,
            "num_rank_rows_free": stats.num_rank_rows_free,
            "residents": tuple(resident.digest for resident in stats.residents),
            "pinned": tuple(resident.digest for resident in stats.residents if resident.num_pins),
            "num_adapter_writes": stats.num_adapter_writes,
            "num_tokens_generated": stats.num_tokens_generated,
            "num_aborted": stats.num_aborted,
        }

    def check_health(self) -> None:
        if self._thread.failure is not None:
            raise self._thread.failure
        if self._reporter.done():
            raise RuntimeError("the replica no longer reports to placement") from self._reporter.exception()

    async def __del__(self) -> None:
        self._reporter.cancel()
        await asyncio.to_thread(self._thread.stop, 10.0)
        self._backend.close()

    def _must_be(self, target_replica_id: str | None) -> None:
        if target_replica_id is not None and target_replica_id != self._replica_id:
            raise NotReady(f"meant for replica {target_replica_id} but reached {self._replica_id}")

    async def _fetch(self, ref: AdapterRef) -> LoraAdapter:
        """The adapter as views of shared memory. Lost memory (its owner died, it was evicted) is read again."""
        try:
            return await self._fetch_once(ref)
        except (OwnerDiedError, ObjectLostError, RayActorError) as error:
            logger.info("adapter %s: asking the store again after %s", ref.name, type(error).__name__)
        await asyncio.sleep(1.0)  # a store that restarts needs about two seconds; Ray queues the call meanwhile
        await self._store.call("lost", ref.digest)
        return await self._fetch_once(ref)

    async def _fetch_once(self, ref: AdapterRef) -> LoraAdapter:
        header, refs = await self._store.call("fetch", ref)
        arrays = [await unwrapped(object_ref) for object_ref in refs]
        return unpack_adapter(header, arrays)

    async def _report_forever(self) -> None:
        """Tell placement what is here: at once when it changed, at intervals otherwise."""
        while True:
            stats = self._thread.stats()
            resident = tuple(sorted(item.digest for item in stats.residents))
            report = self._service.report(self._replica_id, stats.num_running, stats.num_waiting, resident)
            try:
                await self._placement.call("report", report)
            except RayActorError as error:
                logger.warning("placement is away (%s); reporting again", type(error).__name__)
            try:
                await asyncio.wait_for(self._service.changed.wait(), self._report_interval_s)
                await asyncio.sleep(MIN_REPORT_INTERVAL_S)
            except TimeoutError:
                pass
            self._service.changed.clear()
