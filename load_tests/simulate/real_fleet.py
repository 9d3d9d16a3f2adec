"""Real replicas under a trace: real engines and control plane, clocks that count CPU seconds.

Everything from the dispatcher down is the service's: connections, placement, reports, replicas and engines. A step is
computed, and then lasts on the loop's clock as many seconds as its thread computed: each replica has its own core,
however busy the machine is, and idle time passes at once. Only the time between steps is simulated. Processes, sockets
and HTTP are left out.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.config import LimitsConfig, PlacementConfig
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaIdentity
from app.deployments.placement.service import PlacementService
from app.deployments.replica.adapter_fetcher import AdapterFetcher
from app.deployments.replica.engine_service import EngineService
from app.deployments.replica.status_reporter import StatusReporter
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.rpc.transport import Frame
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.reading import read_adapter
from app.engine.backend import Backend
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.engine_thread import EngineThread
from app.engine.errors import EngineFailure
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, SamplingParams
from app.simulation.traffic import BASE, Traffic
from load_tests.control.simulated_service import SimulatedIngress
from load_tests.popularity import adapter_indices
from load_tests.random_adapters import write_random_adapter
from load_tests.virtual_time import run_virtually

#: Ranks are taken in turn; eight adapters of rank 16 fill the rows of a replica.
RANKS = (8, 16, 32)
#: Of adapters in bfloat16 that change every module.
RANKS_PER_ROW = 2
NUM_ADAPTERS = 24
#: Prompts have token ids below it, which every model has.
MAX_TOKEN_ID = 61
#: Mean tokens of prompts and answers; both are geometric.
LENGTHS = (32, 16)
#: The simulator has one order for all tenants: no bound on how much they slow one another.
CONFIG = EngineConfig(
    cpu=CpuConfig(num_threads=1),
    lora_pool_rows=64,
    max_loras=17,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    num_kv_blocks=512,
    max_model_len=512,
    speculative_decoding="off",
    max_tenant_slowdown=0.0,
)


class Step(NamedTuple):
    """What one step computed: sequences that decode, rank rows of all its adapters, prompt tokens, the tokens that
    those look at, rank rows written before it; and the seconds that its thread computed."""

    num_decoding: int
    num_rows: int
    num_prompt: int
    num_looks: int
    num_written: int
    seconds: float


@dataclass
class FleetResult:
    """Times of N requests in seconds from their arrival, [N] float64, and the replicas' counts."""

    first_token_s: NDArray[np.float64]
    total_s: NDArray[np.float64]
    num_loads: int = 0
    num_starts: int = 0
    end_s: float = 0.0
    steps: list[Step] = field(default_factory=list)


class _RecordingBackend:
    """A backend that records its inputs. It is a `Backend` as far as the engine needs one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.spec, self.limits, self.compile_s = backend.spec, backend.limits, 0.0
        self.prepare_adapter, self.is_ready = backend.prepare_adapter, backend.is_ready
        self.release_adapter, self.trim_memory, self.close = backend.release_adapter, backend.trim_memory, backend.close
        self._rank_of: dict[int, int] = {}
        self._num_written = 0
        self.step = Step(0, 0, 0, 0, 0, 0.0)  # the last one, without its seconds

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        self._backend.write_adapter(adapter_slot, row_start, adapter)
        self._rank_of[adapter_slot] = adapter.card.max_rank
        self._num_written += adapter.card.max_rank

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        counts = np.diff(batch.query_starts)
        num_decoding = int((counts == 1).sum())
        num_rows = sum(self._rank_of.get(slot, 0) for slot in {*batch.run_adapter_slots.tolist()})
        is_prompt = np.repeat(counts > 1, counts)
        num_looks = int((batch.positions[is_prompt] + 1).sum())
        num_prompt = len(batch.token_ids) - num_decoding
        self.step = Step(num_decoding, num_rows, num_prompt, num_looks, self._num_written, 0.0)
        self._num_written = 0
        return self._backend.forward(batch)


class SteppedEngine(EngineThread):
    """An engine that the loop steps, not a thread: a step lasts as long as `spent_s` says that it computed."""

    def __init__(self, backend: Backend, config: EngineConfig, spent_s: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._spent_s = spent_s
        self._backend = _RecordingBackend(backend)
        self._began_s: float | None = None
        self._has_news = asyncio.Event()
        self.steps: list[Step] = []
        super().__init__(Engine(self._backend, config, self._clock), lambda _: None)

    def _clock(self) -> float:
        return self._loop.time() + (0.0 if self._began_s is None else self._spent_s() - self._began_s)

    async def run(self, service: EngineService) -> None:
        """Step as long as there is work, until cancelled. The thread of the loop computes."""
        while True:
            if not self._engine.has_work:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            num_before = self.stats().num_steps
            self._began_s = self._spent_s()
            chunks = self._engine.step()
            spent_s = self._spent_s() - self._began_s
            self._began_s = None
            if self.stats().num_steps > num_before:
                self.steps.append(self._backend.step._replace(seconds=spent_s))
            await asyncio.sleep(spent_s)
            if chunks:
                service.on_step(chunks)

    def warm_up(self) -> None:
        """Do nothing: measurements warm up with a trace."""

    def start(self) -> None:
        """Nothing: `run` is a task."""

    def stop(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002
        self._engine.shut_down(EngineFailure("the measurement is over"))
        return True

    def check_progress(self, max_step_s: float) -> bool:  # noqa: ARG002
        return False

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        super().submit(request, adapter)
        self._has_news.set()

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._has_news.set()

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        super().add_remote_service(served, continues=continues)
        self._has_news.set()


class _HostMemory(AdapterFetcher):
    """Adapters on the host, for every replica."""

    def __init__(self, adapters: Mapping[str, LoraAdapter]) -> None:
        self._adapters = adapters

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        return self._adapters[ref.digest]


class _NoRegistry(StoreService[SharedAdapter]):
    """A store without a registry."""

    def __init__(self) -> None: ...

    async def observe(self, *_: object) -> None:
        return None


async def _no_traffic_weights(*_: object) -> tuple[Version, Changes[str, float]] | None:
    await asyncio.Event().wait()
    return None


class _Replica:
    """One engine with its service and its reports."""

    def __init__(
        self,
        replica_id: str,
        backend: Backend,
        config: EngineConfig,
        host: _HostMemory,
        placement: PlacementService,
        spent_s: Callable[[], float],
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.service = EngineService(host, clock, max_queued_requests=config.max_queued_requests)
        self.engine = SteppedEngine(backend, config, spent_s)
        self.service.start(self.engine)
        settings = PlacementConfig()
        self.reports = StatusReporter(
            replica_id, self.engine, self.service, placement, _NoRegistry(), (),
            delta_reporter=DeltaReporter(ReplicaIdentity("store", settings.model_dump_json(), clock())),
            is_draining=lambda: False,
            interval_s=settings.report_interval_s, clock=clock,
        )  # fmt: skip
        self.tasks = [
            asyncio.create_task(self.engine.run(self.service)),
            asyncio.create_task(self.reports.run()),
        ]


class _Calls:
    """`Transport` to replicas of this process."""

    def __init__(self, replicas: Mapping[str, _Replica]) -> None:
        self._replicas = replicas

    def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        return self._replicas[replica_id].service.frames(link_id)

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        return self._replicas[replica_id].service.submit(link_id, requests)

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        self._replicas[replica_id].service.abort(request_ids)

    async def wake(self) -> None:
        """All replicas are there from the beginning."""


async def measure_fleet(
    backends: Sequence[Backend],
    config: EngineConfig,
    adapters: Sequence[LoraAdapter],
    traffic: Traffic,
    seed: int = 0,
    spent_s: Callable[[], float] = time.thread_time,
) -> FleetResult:
    """Run the traffic to its end on one replica per backend; on a `VirtualLoop`. adapters[i]: of index i.

    `seed` is of the ingress's choices between replicas. `spent_s` counts the seconds that backends have computed.
    """
    loop = asyncio.get_running_loop()
    placement = PlacementService(PlacementConfig(), lambda _: _no_traffic_weights, lambda: None, loop.time)
    host = _HostMemory({adapter.card.digest: adapter for adapter in adapters})
    replicas = {
        name: _Replica(name, backend, config, host, placement, spent_s)
        for name, backend in ((f"r{i:04d}", backend) for i, backend in enumerate(backends))
    }
    ingress = SimulatedIngress("ingress", placement, _Calls(replicas), LimitsConfig(), seed)
    await asyncio.sleep(3.0)  # placement knows all of them, and assigns replicas
    began_s = loop.time()
    count = traffic.num_requests
    measured = FleetResult(np.full(count, math.nan), np.full(count, math.nan))

    async def ask(index: int) -> None:
        await asyncio.sleep(float(traffic.arrival_s[index]) - (loop.time() - began_s))
        came_s = loop.time()
        async for chunk in ingress.dispatcher.stream(_request(traffic, index, adapters)):
            if chunk.error is not None:
                raise chunk.error
            if chunk.token_ids and math.isnan(measured.first_token_s[index]):
                measured.first_token_s[index] = loop.time() - came_s
        measured.total_s[index] = loop.time() - came_s

    await asyncio.gather(*(ask(index) for index in range(count)))
    measured.end_s = loop.time() - began_s
    for replica in replicas.values():
        stats = replica.engine.stats()
        measured.num_loads += stats.num_adapter_misses
        measured.num_starts += stats.num_adapter_misses + stats.num_adapter_hits
        measured.steps += replica.engine.steps
        for task in replica.tasks:
            task.cancel()
    await ingress.close()
    await placement.close()
    return measured


def _request(traffic: Traffic, index: int, adapters: Sequence[LoraAdapter]) -> GenerateRequest:
    which = int(traffic.adapter[index])
    ref = None
    tenant = f"t{traffic.tenant[index]}"
    if which != BASE:
        ref = AdapterRef(f"a{which}", adapters[which].card.digest, tenant)
    tokens = np.random.default_rng(index).integers(1, MAX_TOKEN_ID, int(traffic.prompt_tokens[index]))
    sampling = SamplingParams(max_tokens=int(traffic.output_tokens[index]), temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        f"r{index}",
        tenant,
        tuple(tokens.tolist()),
        sampling,
        ref,
        weight=traffic.weights.get(int(traffic.tenant[index]), 1.0),
    )


def trace(seed: int, rate: float, seconds: float) -> Traffic:
    """Poisson arrivals at `rate` a second, Zipf 1.0 over the adapters, a tenth for the base, two tenants."""
    rng = np.random.default_rng(seed)
    count = max(1, round(rate * seconds))
    arrival_s = np.cumsum(rng.exponential(1 / rate, count))
    adapter = adapter_indices("zipf:1", NUM_ADAPTERS, arrival_s, rng)
    prompt, output = LENGTHS
    return Traffic(
        arrival_s=arrival_s,
        adapter=np.where(rng.random(count) < 0.1, -1, adapter).astype(np.int64),
        prompt_tokens=np.clip(rng.geometric(1 / prompt, count), 1, 256),
        output_tokens=np.clip(rng.geometric(1 / output, count), 1, 256),
        tenant=rng.integers(0, 2, count),
        rank=np.array([RANKS[index % len(RANKS)] for index in range(NUM_ADAPTERS)], np.int64),
    )


def make_adapters(spec: ModelSpec, folder: Path) -> list[LoraAdapter]:
    """NUM_ADAPTERS random ones, of the ranks in turn, by the digests that the simulation gives them.

    An adapter's digest decides which replica it prefers: with the same ones, real and simulated fleets place alike.
    """
    adapters = []
    for index, digest in enumerate(trace(0, 1.0, 1.0).digests()):
        path = write_random_adapter(folder / f"a{index}", spec, RANKS[index % len(RANKS)], index, bf16=True)
        adapter = read_adapter(path, spec)
        adapters.append(replace(adapter, card=replace(adapter.card, digest=digest)))
    return adapters


def run_real(
    backends: Sequence[Backend], adapters: Sequence[LoraAdapter], traffic: Traffic, seed: int = 0
) -> FleetResult:
    """`measure_fleet` on the virtual clock, with `CONFIG`."""
    gc.collect()
    gc.freeze()  # what is there now is there for the whole run; a step does not pay for looking at it
    return run_virtually(measure_fleet(backends, CONFIG, adapters, traffic, seed))
