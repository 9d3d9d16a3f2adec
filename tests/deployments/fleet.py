"""A fleet in one process: real engines over fake backends, a transport whose replicas can be killed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from app.config import LimitsConfig, PlacementConfig
from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.dispatch.request_router import PrefixHasher, RequestRouter
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaReport, Residency, Row
from app.deployments.placement.policy import PlacementPolicy
from app.deployments.placement.replica_choice import make_policy
from app.deployments.placement.state import PlacementState
from app.deployments.placement.view import PlacementView
from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc.transport import Frame, ReplicaGone, ReplicaLeaving
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.engine_thread import EngineThread
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, RequestUsage
from app.engine.structured_output.backend_guidance import Vocabulary
from tests.deployments.placed import ORIGIN
from tests.fakes import FakeBackend, fake_spec

LIMITS = BackendLimits(256, 8, lora_pool_rows=64, rank_alignment=8, max_loras=16, can_embed=True)


class PausableBackend(FakeBackend):
    """Computes `max_steps` steps (None: all), then waits to be resumed: a replica caught in the middle.

    Who resumes it after a caller has left waits first until the abort has come (`FakeReplica.aborted`): it is sent
    without waiting, and a backend goes on faster than it arrives.
    """

    def __init__(self, spec: ModelSpec | None = None, num_guesses: int = 0) -> None:
        super().__init__(replace(LIMITS, num_draft_rows=num_guesses), spec)
        self.max_steps: int | None = None
        self.num_steps = 0
        self.resumed = threading.Event()
        self.fails_over: Callable[[ForwardBatch], bool] = lambda _: False

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        while self.max_steps is not None and self.num_steps >= self.max_steps and not self.resumed.wait(0.002):
            pass  # `max_steps` may have been raised meanwhile
        self.num_steps += 1
        if self.fails_over(batch):
            raise RuntimeError("an illegal instruction")
        return super().forward(batch)


class FakeReplica:
    """One engine thread with its service; `kill` is what a lost process looks like from outside."""

    def __init__(self, replica_id: str, fleet: Fleet, *, max_queued_requests: int = 512, idle_s: float = 5.0) -> None:
        self.replica_id = replica_id
        self.dead = asyncio.Event()
        self.draining = False
        self.attaches = asyncio.Event()  # cleared: a reader hears nothing for now
        self.attaches.set()
        self.reporter = DeltaReporter(ORIGIN)
        self.submitted: list[GenerateRequest] = []
        self.calls: list[int] = []
        self.aborted: list[str] = []  # attempts that it was told to end
        self.service = EngineService(
            fleet, time.time, max_queued_requests=max_queued_requests, usage_recorder=fleet, idle_s=idle_s
        )
        self.backend = PausableBackend(fleet.spec, fleet.num_guesses)
        config = EngineConfig(max_queued_requests=max_queued_requests, speculative_decoding=fleet.num_guesses or "off")
        self.engine = Engine(self.backend, config, grammars=fleet.grammars)
        self.thread = EngineThread(self.engine, self.service.on_step)
        self.service.start(self.thread)
        self.thread.start()

    def report(self) -> ReplicaReport:
        stats = self.thread.stats()
        return self.service.report(
            self.replica_id, stats.num_running, stats.num_waiting, tuple(item.digest for item in stats.residents)
        )


class Unbatched:
    """The dispatcher's `Batcher` without any: a stream is assigned when it comes, alone."""

    def __init__(self, router: RequestRouter) -> None:
        self._router = router

    async def assign(self, stream: Stream) -> None:
        self._router.assign([stream])


class FleetDispatcher(Dispatcher):
    """A dispatcher over a fleet, with the parts that are below it."""

    def __init__(self, fleet: Fleet, replica_timeout_s: float) -> None:
        clock = asyncio.get_running_loop().time
        connections = ReplicaConnections(fleet, fleet, ReplicaLoadTracker(clock))
        heads = PrefixHasher((fleet.spec or fake_spec()).digest, LIMITS.block_size)
        self.router = RequestRouter(
            connections, fleet, fleet.policy, clock, random.Random(0), replica_timeout_s, heads.of
        )
        super().__init__(Unbatched(self.router), connections, ColdStartLimiter(fleet, LimitsConfig()))

    async def close(self) -> None:
        await self.router.close()
        await super().close()


class Fleet:
    """Transport, placer and adapter store of a dispatcher under test."""

    def __init__(
        self,
        num_replicas: int,
        *,
        max_queued_requests: int = 512,
        idle_s: float = 5.0,
        spec: ModelSpec | None = None,
        grammars: Callable[[], Vocabulary] | None = None,
        num_guesses: int = 0,
    ) -> None:
        self._options = (max_queued_requests, idle_s)
        self.spec, self.grammars, self.num_guesses = spec, grammars, num_guesses
        self.replicas: dict[str, FakeReplica] = {}
        self.adapters: dict[str, LoraAdapter] = {}
        self.fetches: list[str] = []
        self.fetch_delay_s = 0.0
        self.usage_recorder: UsageRecorder | None = None  # told what replicas count, too
        self.consumed: dict[str, RequestUsage] = {}  # by attempt
        self.where: dict[str, str] = {}  # replica by attempt
        self.fetch_gate = asyncio.Event()
        self.fetch_gate.set()
        self.num_woken, self.woken = 0, asyncio.Event()  # set: a fleet without replicas has one started when asked
        self.kv_tokens: dict[
            str, int
        ] = {}  # what replicas say that their KV memory holds, before they are on the table
        self.off_table: set[str] = set()  # replicas that placement has dropped
        self.drained: set[str] = set()  # those that an operator drains
        self.unreached_ids: set[str] = set()  # those that an ingress could not reach at any time
        self.policy: PlacementPolicy = make_policy(PlacementConfig())
        self.books = PlacementState(self.policy, heartbeat_timeout_s=10, report_interval_s=1)
        for _ in range(num_replicas):
            self.add()

    def add(self) -> FakeReplica:
        max_queued_requests, idle_s = self._options
        replica = FakeReplica(
            f"replica-{len(self.replicas)}", self, max_queued_requests=max_queued_requests, idle_s=idle_s
        )
        self.replicas[replica.replica_id] = replica
        return replica

    def dispatcher(self, *, replica_timeout_s: float = 120.0) -> FleetDispatcher:
        return FleetDispatcher(self, replica_timeout_s)

    def record_usage(self, request: GenerateRequest, request_usage: RequestUsage) -> None:
        """What replicas count of requests; a replica that was killed counts nothing any more."""
        if not self.replicas[self.where[request.request_id]].dead.is_set():
            self.consumed[request.request_id] = request_usage
            if self.usage_recorder is not None:
                self.usage_recorder.record_usage(request, request_usage)

    def record_load(self, ref: AdapterRef, size_bytes: int) -> None:
        if self.usage_recorder is not None:
            self.usage_recorder.record_load(ref, size_bytes)

    def kill(self, replica_id: str) -> None:
        self.replicas[replica_id].dead.set()

    def stop(self) -> None:
        for replica in self.replicas.values():
            replica.backend.resumed.set()
            assert replica.thread.stop(120.0)

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        self.fetches.append(ref.digest)
        await asyncio.sleep(self.fetch_delay_s)
        await self.fetch_gate.wait()
        return self.adapters[ref.digest]

    # -- Placer ---------------------------------------------------------------------------------

    @property
    def view(self) -> PlacementView:
        """As if every replica that placement knows had just reported, and every ingress heard it."""
        for replica in self.replicas.values():
            if replica.replica_id not in self.off_table and not replica.dead.is_set():
                is_draining = replica.thread.failure is not None or replica.replica_id in self.drained
                report = replace(
                    replica.report(), num_kv_tokens=self.kv_tokens.get(replica.replica_id, 0),
                    cached_prefixes=replica.thread.stats().cached_prefixes,
                )  # fmt: skip
                assert self.books.report(replica.reporter.next_delta(report, is_draining=is_draining), 0.0)
        return self.books.view

    def assigned_replicas(self, digest: str) -> Row:
        return self.view.assigned_replicas(digest)

    def drop(self, replica_id: str) -> None:
        """Placement takes a replica off the table."""
        self.off_table.add(replica_id)
        self.books._remove_replica(replica_id)

    async def assign(self, digests: Sequence[str]) -> None:
        assert self.view.replicas is not None
        self.books.assign(digests)

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))

    async def report_unreachable(self, replica_ids: Sequence[str]) -> None:
        self.unreached_ids.update(replica_ids)

    async def residency(self, digest: str) -> list[Residency]:
        assert self.view.replicas is not None
        return self.books.residency(digest)

    # -- Transport ------------------------------------------------------------------------------

    async def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        replica = self._reach(replica_id, is_new=True)
        await replica.attaches.wait()
        source = replica.service.frames(link_id)
        dead = asyncio.ensure_future(replica.dead.wait())
        try:
            while True:
                following = asyncio.ensure_future(anext(source, None))
                await asyncio.wait((following, dead), return_when=asyncio.FIRST_COMPLETED)
                if dead.done():
                    following.cancel()
                    raise ReplicaGone(replica_id)
                frame = following.result()
                if frame is None:
                    return
                yield frame
        finally:
            dead.cancel()

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        await asyncio.sleep(0)
        replica = self._reach(replica_id, is_new=True)
        replica.submitted += requests
        self.where |= {request.request_id: replica_id for request in requests}
        replica.calls.append(len(requests))
        return replica.service.submit(link_id, requests)

    async def wake(self) -> None:
        self.num_woken += 1
        await self.woken.wait()
        if not self.replicas:
            self.add()

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        replica = self._reach(replica_id)
        replica.service.abort(request_ids)
        replica.aborted += request_ids

    async def drain(self, replica_id: str) -> bool:
        self._reach(replica_id, is_new=True)
        is_new = replica_id not in self.drained
        self.drained.add(replica_id)
        return is_new

    def _reach(self, replica_id: str, *, is_new: bool = False) -> FakeReplica:
        """As the router of the real one: while a replica drains only what ends work reaches it."""
        replica = self.replicas[replica_id]
        if replica.dead.is_set():
            raise ReplicaGone(replica_id)
        if replica.draining and is_new:
            raise ReplicaLeaving(replica_id)
        return replica
