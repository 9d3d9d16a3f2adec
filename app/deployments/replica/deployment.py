"""The engine as a Serve deployment: targeted calls of ingresses in, frames of chunks out.

A thin shell over `EngineService`: it opens an engine and its helpers and forwards calls. A failed engine fails the
health check, and Serve replaces the replica; so does a replica that an operator drains. Draining needs nothing special:
readers end once they have no requests, and Serve waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve

from app.config import AppConfig, usage_folder
from app.deployments.placement.actor import placement_service
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaIdentity
from app.deployments.registry.pins import Pins
from app.deployments.replica.adapter_fetcher import AdapterFetcher
from app.deployments.replica.autoscaling_metrics import DEMAND_S, AutoscalingMetrics
from app.deployments.replica.engine_service import EngineService
from app.deployments.replica.metrics import DeviceMetrics, EngineMetrics
from app.deployments.replica.orphan_cleanup import OrphanedAdapters
from app.deployments.replica.pin_controller import PinController
from app.deployments.replica.status_reporter import StatusReporter
from app.deployments.replica.warm_up import WarmUp, wait_for_pins
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.health_check import HealthCheck
from app.deployments.rpc.long_poll_client import LongPollValue
from app.deployments.rpc.ray_private import is_replica_draining, listen_on_loopback
from app.deployments.rpc.transport import ReplicaLeaving, check_protocol
from app.deployments.rpc.uds_transport import FrameSocket
from app.deployments.store.actor import store_actor, store_name, store_service, tenants_actor, tenants_service
from app.deployments.store.metrics import TierMetrics
from app.deployments.tenancy.usage.flusher import UsageFlusher
from app.deployments.tenancy.usage.prices import Prices
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.deployments.tenancy.usage.wal import open_wal
from app.engine.config import EngineConfig
from app.engine.errors import EngineFailure, NotReady
from app.engine.factory import create_engine
from app.engine.models.checkpoint import Checkpoint, open_model
from app.engine.request import GenerateRequest
from app.logging import LogEvent, start_log

logger = logging.getLogger(__name__)


class EngineReplica:
    """One base model in memory, its adapters and its requests."""

    async def __init__(self, config_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        listen_on_loopback()
        config = AppConfig.model_validate_json(config_json)
        context = serve.get_replica_context()
        replica_id = self._replica_id = context.replica_id.unique_id
        start_log(config.logs, f"engine {replica_id}")
        self._is_drained = False
        self._health = HealthCheck(self._check)
        started_s = time.monotonic()
        store = store_service(store_actor(config))
        self._placement = placement_service(config, context.app_name)
        identity = ReplicaIdentity(store_name(config), config.placement.model_dump_json(), time.time())
        adapters = AdapterFetcher(store, time.monotonic)
        writer_id = f"{replica_id}-{uuid.uuid4().hex[:8]}"
        owner = tenants_service(tenants_actor(config))
        flusher = self._flusher = UsageFlusher(owner.record, writer_id, open_wal(usage_folder(config), writer_id))
        recorder = UsageRecorder(
            flusher, Prices(config.tenants.prices, config.model.name), config.model.name, time.time
        )
        service = self._service = EngineService(
            adapters,
            time.time,
            max_queued_requests=config.engine.max_queued_requests,
            usage_recorder=recorder,
            is_draining=self._is_draining,
        )
        checkpoint = await asyncio.to_thread(open_model, config.model.uri, config.model.name, config.engine.arithmetic)
        start_s = await self._start_engine(checkpoint, config.engine, started_s)
        pinned = LongPollValue(store.watch_pins, replica_id, Pins())
        await wait_for_pins(store, pinned, replica_id)
        warm_up = WarmUp(self._engine, config.engine, adapters, store, count_load=recorder.record_load)
        for adapter in reversed(await warm_up.run(pinned.value)):
            service.adapters.add(adapter)
        self._socket = FrameSocket(replica_id)
        await self._socket.open()
        self._pins = PinController(self._engine, adapters, service)
        self._orphans = OrphanedAdapters(service, store)
        self._reporter = StatusReporter(
            replica_id,
            self._engine,
            service,
            self._placement,
            store,
            (EngineMetrics(start_s), DeviceMetrics(TierMetrics(), checkpoint.spec)),
            delta_reporter=DeltaReporter(identity),
            is_draining=self._is_draining,
            interval_s=config.placement.report_interval_s,
            clock=time.monotonic,
            reports_prefixes=config.placement.prefix_affinity,
        )
        self._autoscaling = AutoscalingMetrics(time.monotonic)
        self._tasks = Tasks()
        self._tasks.run_forever(
            self._reporter.run,
            flusher.flush_loop,
            partial(self._pins.follow, pinned),
            pinned.follow,
            self._orphans.run,
            partial(service.watch_steps, config.engine.step_limit_s),
        )
        seconds = time.monotonic() - started_s
        logger.info(LogEvent("engine replica ready", replica=replica_id, model=config.model.name, seconds=seconds))

    async def _start_engine(self, checkpoint: Checkpoint, config: EngineConfig, started_s: float) -> dict[str, float]:
        """Create and start the engine; returns the seconds of each part."""
        service, loop = self._service, asyncio.get_running_loop()

        def on_failure(failure: EngineFailure) -> None:
            logger.error(LogEvent("engine failed", replica=self._replica_id, reason=str(failure)))
            loop.call_soon_threadsafe(service.changed.set)  # triggers the last report
            loop.call_soon_threadsafe(self._health.fail)

        self._engine = await asyncio.to_thread(create_engine, checkpoint, config, service.on_step, on_failure)
        loaded_s = time.monotonic()
        await asyncio.to_thread(self._engine.warm_up)
        start_s = {"load": loaded_s - started_s, "warm_up": time.monotonic() - loaded_s}
        service.start(self._engine)
        self._engine.start()
        return start_s

    async def frames(
        self, link_id: str, by_socket: bool = False, protocol: int = 0, target_replica_id: str | None = None
    ) -> AsyncGenerator[bytes]:
        """Attach a reader; its first frame is empty. `by_socket`: the other frames go through its connection to our
        socket.

        Raises ReplicaUnreachable if the reader speaks another protocol; it must use replicas of its own release.
        """
        self._check_takes_requests(target_replica_id)
        check_protocol(protocol)
        async with aclosing(self._service.packed_frames(link_id, self._socket if by_socket else None)) as items:
            async for item in items:
                yield item

    async def submit(
        self, link_id: str, requests: Sequence[GenerateRequest], target_replica_id: str | None = None
    ) -> bool:
        """Accept requests whose chunks go to this link. Raises ReplicaGone if the engine has failed, and ReplicaLeaving
        once Serve is stopping this replica."""
        self._check_takes_requests(target_replica_id)
        return self._service.submit(link_id, requests)

    async def abort(self, request_ids: Sequence[str], target_replica_id: str | None = None) -> None:
        """End requests; none of their chunks is delivered afterwards."""
        self._check_target(target_replica_id)
        self._service.abort(request_ids)

    async def unload_adapter(self, digest: str, target_replica_id: str | None = None) -> int:
        """Free an adapter's rows once its last sequence has ended; returns the number of freed rows."""
        self._check_target(target_replica_id)
        return await self._service.unload_adapter(digest)

    async def drain(self, target_replica_id: str | None = None) -> bool:
        """Take no new requests from now on; False if this replica drains already.

        Placement learns it with the next report. The health check fails from now on, so Serve starts another replica
        and stops this one as any other, once its requests have ended.
        """
        self._check_target(target_replica_id)
        if self._is_draining():
            return False
        self._is_drained = True
        self._service.changed.set()
        self._health.fail()
        logger.info(LogEvent("engine replica drains", replica=self._replica_id))
        return True

    async def stats(self, target_replica_id: str | None = None) -> dict[str, Any]:
        """Counts, for tests and operators."""
        self._check_target(target_replica_id)
        process = {"replica_id": self._replica_id, "pid": os.getpid(), "memory_bytes": _resident_bytes()}
        return process | {"num_socket_links": self._socket.num_connections} | self._service.counts()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Numbers for Serve's autoscaler (`placement.autoscaling`); called only if there is one."""
        service = self._service
        return self._autoscaling.sample(
            self._engine.stats(), service.num_waiting_for_adapters, service.requested_within(DEMAND_S)
        )

    async def check_health(self) -> None:
        await self._health.answer()

    def _check(self) -> None:
        if self._engine.failure is not None:
            raise self._engine.failure
        if self._is_drained:
            raise NotReady(f"replica {self._replica_id} drains, as an operator asked; Serve replaces it")
        self._tasks.check()

    async def __del__(self) -> None:
        logger.info(LogEvent("engine replica stopped", replica=self._replica_id))
        await self._tasks.close()
        self._reporter.close()
        self._pins.close()
        self._orphans.close()
        self._socket.close()
        await asyncio.to_thread(self._engine.stop, 10.0)
        await self._flusher.close()

    def _is_draining(self) -> bool:
        return self._is_drained or is_replica_draining()

    def _check_takes_requests(self, target_replica_id: str | None) -> None:
        self._check_target(target_replica_id)
        if is_replica_draining():
            raise ReplicaLeaving(f"replica {self._replica_id} is being stopped")

    def _check_target(self, target_replica_id: str | None) -> None:
        if target_replica_id is not None and target_replica_id != self._replica_id:
            raise NotReady(f"the call for replica {target_replica_id} reached {self._replica_id}")


def _resident_bytes() -> int:
    """Resident memory of this process, including mapped shared memory; its maximum where there is no /proc."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
