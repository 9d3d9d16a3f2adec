"""A service in one process on one clock: the real placement, ingresses and replicas without engines.

Ingresses place requests over placement's real service with its real tables, loads and floors. Only calls that Ray would
carry pass between the parts.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from app.config import LimitsConfig, PlacementConfig
from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.dispatch.request_router import PrefixHasher, RequestRouter
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaIdentity, ReplicaReport
from app.deployments.placement.placer import LoadTableClient, PlacementTableClient, Placer
from app.deployments.placement.replica_choice import make_policy
from app.deployments.placement.service import PlacementService
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.rpc.transport import Transport
from app.engine.adapters.card import AdapterRef
from app.engine.request import GenerateRequest, SamplingParams
from load_tests.control.fake_replicas import InstantReplicas


def request(name: str, digest: str | None = None) -> GenerateRequest:
    """A request for the base, or for the adapter with these contents."""
    ref = None if digest is None else AdapterRef(f"adapter {digest[:8]}", digest, "default")
    return GenerateRequest(name, "default", (1,), SamplingParams(), adapter=ref)


async def _no_traffic_weights(*_: object) -> tuple[Version, Changes[str, float]] | None:
    await asyncio.Event().wait()
    return None


class SimulatedPlacer(Placer):
    """A placer over placement's service in this process. `delay_s` is what a question takes."""

    def __init__(self, service: PlacementService, watched: PlacementTableClient, ingress_id: str) -> None:
        super().__init__(service, watched, ingress_id)
        self.delay_s = 0.0
        self.questions: list[Sequence[str]] = []

    async def assign(self, digests: Sequence[str]) -> None:
        self.questions.append(digests)
        await asyncio.sleep(self.delay_s)
        self.view.add_pending(await self._placement.assign(digests))

    async def report_unreachable(self, replica_ids: Sequence[str]) -> None:
        await self._placement.report_unreachable(self._ingress_id, replica_ids)


class _UnbatchedRouter:
    """Assigns every stream on arrival, without batching."""

    def __init__(self, router: RequestRouter) -> None:
        self._router = router

    async def assign(self, stream: Stream) -> None:
        self._router.assign([stream])


T = TypeVar("T", bound=Transport)


class SimulatedIngress(Generic[T]):
    """An ingress from the dispatcher down, over any transport."""

    def __init__(
        self, ingress_id: str, service: PlacementService, replicas: T, limits: LimitsConfig, seed: int
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.replicas = replicas
        self.loads = ReplicaLoadTracker(clock)
        self.watched = PlacementTableClient(service.watch, ingress_id)
        self.placer = SimulatedPlacer(service, self.watched, ingress_id)
        self.connections = ReplicaConnections(replicas, self.placer, self.loads)
        policy = make_policy(PlacementConfig())
        hasher = PrefixHasher("no base", 16)
        self.router = RequestRouter(
            self.connections, self.placer, policy, clock, random.Random(seed), limits.replica_timeout_s, hasher.of
        )
        self.cold = ColdStartLimiter(self.placer, limits)
        self.dispatcher = Dispatcher(_UnbatchedRouter(self.router), self.connections, self.cold)
        watched_loads = LoadTableClient(service.watch_loads, ingress_id, self.loads.apply_reports)
        self.followers = [asyncio.create_task(follow()) for follow in (self.watched.follow, watched_loads.follow)]

    async def answer(self, generate_request: GenerateRequest) -> None:
        """Run one request to its end. Raises what the dispatcher raises."""
        async for chunk in self.dispatcher.stream(generate_request):
            if chunk.error is not None:
                raise chunk.error

    async def close(self) -> None:
        for follower in self.followers:
            follower.cancel()
        await self.router.close()
        await self.dispatcher.close()


class SimulatedService:
    """Placement, its ingresses and replicas; `resident` is what each replica's device holds.

    `carry` may put something between placement's methods and those who call them.
    """

    def __init__(
        self,
        num_ingresses: int,
        replicas: Sequence[str],
        service_s: Callable[[], float],
        *,
        resident: Mapping[str, Sequence[str]] | None = None,
        limits: LimitsConfig | None = None,
        carry: Callable[[PlacementService], None] = lambda _: None,
    ) -> None:
        config = PlacementConfig()
        clock = asyncio.get_running_loop().time
        self.placement = PlacementService(config, lambda _: _no_traffic_weights, lambda: None, clock)
        carry(self.placement)
        self.num_running: Counter[str] = Counter()
        self.resident = {replica_id: tuple(sorted((resident or {}).get(replica_id, ()))) for replica_id in replicas}
        origin = ReplicaIdentity("store", config.model_dump_json(), 0.0)
        self._reporters = {replica_id: DeltaReporter(origin) for replica_id in replicas}
        self.silent: set[str] = set()
        self.ingresses = [
            SimulatedIngress(
                f"ingress{index}", self.placement, InstantReplicas(self.num_running, service_s),
                limits or LimitsConfig(), index,
            )
            for index in range(num_ingresses)
        ]  # fmt: skip
        self._reporting = [
            asyncio.create_task(self._report(each, index / len(replicas))) for index, each in enumerate(replicas)
        ]

    async def start(self) -> None:
        """Start everything; returns when every ingress knows every replica and placement assigns replicas."""
        await asyncio.sleep(2.0)
        while any(len(ingress.placer.view.replicas) < len(self.resident) for ingress in self.ingresses):
            await asyncio.sleep(0.05)

    async def report(self, replica_id: str) -> None:
        """Make a replica report now."""
        reporter = self._reporters[replica_id]
        state = ReplicaReport(replica_id, self.num_running[replica_id], resident=self.resident[replica_id])
        if not await self.placement.report(reporter.next_delta(state)):
            reporter.reset()
            await self.placement.report(reporter.next_delta(state))

    async def close(self) -> None:
        for task in self._reporting:
            task.cancel()
        for ingress in self.ingresses:
            await ingress.close()
        await self.placement.close()

    async def _report(self, replica_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            if replica_id not in self.silent:
                await self.report(replica_id)
            await asyncio.sleep(1.0)
