"""Cost of the control plane without a model: `python -m load_tests.control.bench_control`.

Placement's real service, ingresses from the dispatcher down and replicas that answer at once run in one process; every
message between them is pickled and unpickled, as Ray would do, and the time of both sides is counted. Ray's own calls
are not included, so the table gives their number.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaIdentity, ReplicaReport
from app.deployments.placement.service import PlacementService
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import CatalogEntry
from app.engine.adapters.card import AdapterRef
from app.engine.request import GenerateRequest
from load_tests.control.simulated_service import SimulatedService, request
from load_tests.popularity import adapter_indices
from load_tests.virtual_time import run_virtually

Rows = list[tuple[str, str]]

NUM_REPLICAS, NUM_RESIDENT, NUM_ADAPTERS, NUM_INGRESSES, RATE = 32, 255, 100_000, 8, 500.0


def digest(index: int) -> str:
    return f"{index * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4


class Costs:
    """Calls of placement by name, the CPU time of its process for them, and the bytes of their answers."""

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.cpu_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - began_s


def carry(service: PlacementService, costs: Costs) -> None:
    """Add the cost of its messages to every call of a service: each is pickled and unpickled."""

    def wrap(name: str, method: Any) -> Any:
        async def call(*args: Any) -> Any:
            sent = pickle.dumps(args, 5)
            with costs.measure():
                args = pickle.loads(sent)
            coroutine = method(*args)
            answer = await _TimedAwait(coroutine, costs)
            with costs.measure():
                answered = pickle.dumps(answer, 5)
            costs.num_calls[name] += 1
            costs.num_bytes[name] += len(answered)
            return pickle.loads(answered)

        return call

    for name in ("report", "assign", "watch", "watch_loads", "report_unreachable"):
        setattr(service, name, wrap(name, getattr(service, name)))


class _TimedAwait:
    def __init__(self, work: Any, costs: Costs) -> None:
        self._work = work
        self._costs = costs

    def __await__(self) -> Any:
        steps, value = self._work.__await__(), None
        while True:
            with self._costs.measure():
                try:
                    waited_for = steps.send(value)
                except StopIteration as end:
                    return end.value
            value = yield waited_for


class Devices:
    """The adapters on each replica's device: the ones used last."""

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self._held = {each: OrderedDict.fromkeys(digests) for each, digests in service.resident.items()}
        self.changed: set[str] = set()

    def use(self, replica_id: str, generate_request: GenerateRequest) -> None:
        if generate_request.adapter is None:
            return
        held = self._held[replica_id]
        if generate_request.adapter.digest not in held:
            held.popitem(last=False)
            self.changed.add(replica_id)
        held[generate_request.adapter.digest] = None
        held.move_to_end(generate_request.adapter.digest)

    async def report_loop(self) -> None:
        """Each replica reports changes ten times a second at most."""
        while True:
            changed, self.changed = self.changed, set()
            for replica_id in changed:
                self._service.resident[replica_id] = tuple(sorted(self._held[replica_id]))
                await self._service.report(replica_id)
            await asyncio.sleep(0.1)


async def scale(seconds: float) -> Rows:
    """The service under Zipf 1.0: half of the requests for the base, half for adapters."""
    draw, loop = random.Random(0), asyncio.get_running_loop()
    ids = [f"EngineReplica#{index:08x}" for index in range(NUM_REPLICAS)]
    resident = {
        each: [digest(index * NUM_RESIDENT + number) for number in range(NUM_RESIDENT)]
        for index, each in enumerate(ids)
    }
    costs = Costs()
    service = SimulatedService(
        NUM_INGRESSES, ids, lambda: 0.0, resident=resident, carry=lambda placement: carry(placement, costs)
    )
    devices = Devices(service)
    for ingress in service.ingresses:
        submit = ingress.replicas.submit

        async def submit_and_use(
            replica_id: str, link_id: str, requests: Sequence[GenerateRequest], submit: Any = submit
        ) -> bool:
            for each in requests:
                devices.use(replica_id, each)
            return bool(await submit(replica_id, link_id, requests))

        ingress.replicas.submit = submit_and_use  # type: ignore[method-assign]
    await service.start()
    reporting = asyncio.create_task(devices.report_loop())
    count = int(RATE * seconds)
    drawn = adapter_indices("zipf:1.0", NUM_ADAPTERS, np.zeros(count), np.random.default_rng(0))
    placed: dict[str, list[float]] = {"base": [], "adapter": []}

    async def ask(number: int, kind: str) -> None:
        began_s = time.perf_counter()
        ref = None if kind == "base" else digest(int(drawn[number]))
        await service.ingresses[number % NUM_INGRESSES].answer(request(f"r{number}", ref))
        placed[kind].append(time.perf_counter() - began_s)

    costs.cpu_s, before, began_s = 0.0, Counter(costs.num_calls), loop.time()
    tasks, due_s = [], began_s
    for number in range(count):
        due_s += draw.expovariate(RATE)
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        tasks.append(asyncio.create_task(ask(number, "base" if number % 2 else "adapter")))
    await asyncio.gather(*tasks)
    took_s = loop.time() - began_s
    reporting.cancel()
    await service.close()
    calls = {name: (costs.num_calls[name] - before[name]) / took_s for name in costs.num_calls}
    rows = [
        (f"{kind} requests, from arrival to the answer of a replica that answers at once: median, p99",
         f"{_ms(np.quantile(times, 0.5))}, {_ms(np.quantile(times, 0.99))}")
        for kind, times in placed.items()
    ]  # fmt: skip
    rows.append(("requests a second", f"{count / took_s:.0f}"))
    rows.append(("placement's CPU, of one core", f"{100 * costs.cpu_s / took_s:.1f} %"))
    rows.append(
        ("calls of placement a second", ", ".join(f"{name} {rate:.0f}" for name, rate in sorted(calls.items())))
    )
    return rows


async def thousand() -> Rows:
    """One thousand replicas of 255 adapters each."""
    service = SimulatedService(1, [f"EngineReplica#{index:08x}" for index in range(1000)], lambda: 0.0)
    (ingress,), placement = service.ingresses, service.placement
    await service.start()
    for number, each in enumerate(list(service.resident)):
        service.resident[each] = tuple(digest(10_000_000 + number * 255 + index) for index in range(255))
        await service.report(each)
    while ingress.placer.view.num_replicas < 1000 or not ingress.placer.view.is_resident(digest(10_000_000 + 254_999)):
        await asyncio.sleep(0.1)
    cold = [digest(index) for index in range(1000)]
    began_s = time.perf_counter()
    answers = [await placement.assign([each]) for each in cold]
    assign_s = (time.perf_counter() - began_s) / len(cold)
    ingress.placer.view.add_pending({each: replica_ids for answer in answers for each, replica_ids in answer.items()})
    held, _ = await placement.watch(None, "new", 1.0) or (None, None)
    while True:
        held, page = await placement.watch(held, "new", 1.0) or (held, None)
        if page is None or page.is_last:
            break
    first = next(iter(service.resident))
    service.resident[first] = (*service.resident[first][1:], digest(99_999_999))
    await service.report(first)
    change = await placement.watch(held, "new", 1.0)
    streams = [Stream(request(f"r{index}", each)) for index, each in enumerate(cold)]
    began_s = time.thread_time()
    for stream in streams:
        ingress.cold.enter(stream)
        ingress.router.assign([stream])
        ingress.cold.leave(stream)
    cold_s = (time.thread_time() - began_s) / len(streams)
    await service.close()
    return [
        ("an `assign` of one adapter: time, bytes", f"{1e6 * assign_s:.0f} us, {len(pickle.dumps(answers[0]))}"),
        ("a residency change as an ingress receives it, bytes", str(len(pickle.dumps(change)))),
        ("a request for a cold adapter in the ingress", f"{1e6 * cold_s:.0f} us"),
        ("a replica's whole report; one change, bytes", " ".join(map(str, _report_bytes()))),
    ]


async def herd(seconds: float) -> Rows:
    """500 requests a second of two seconds each; on a virtual clock."""
    draw, loop = random.Random(0), asyncio.get_running_loop()
    ids = [f"r{index:02d}" for index in range(NUM_REPLICAS)]
    service = SimulatedService(NUM_INGRESSES, ids, lambda: draw.expovariate(0.5))
    await service.start()
    began_s, tasks, ratios = loop.time(), set(), []
    while loop.time() < began_s + seconds:
        task = asyncio.create_task(draw.choice(service.ingresses).answer(request("r")))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if loop.time() > began_s + seconds / 2:
            running = [service.num_running[each] for each in ids]
            ratios.append(max(running) / (sum(running) / len(running)))
        await asyncio.sleep(draw.expovariate(RATE))
    for task in tasks:
        task.cancel()
    await service.close()
    return [("the fullest of 32 replicas over the mean: on the average, p99",
             f"{np.mean(ratios):.2f}, {np.quantile(ratios, 0.99):.2f}")]  # fmt: skip


def names(count: int) -> Rows:
    """Registered names in an ingress."""
    before = _resident_bytes()
    view = RegistryView(
        CatalogEntry(AdapterRef(f"adapter-{index:07d}", digest(index), "default"), 16, 1 << 20, 0.0, "http")
        for index in range(count)
    )
    per_name = (_resident_bytes() - before) / count
    draw = random.Random(0)
    drawn = [f"adapter-{draw.randrange(count):07d}" for _ in range(2000)]
    began_s = time.perf_counter()
    for name in drawn:
        assert view.resolve(name, "", "default") is not None
    lookup_s = (time.perf_counter() - began_s) / len(drawn)
    began_s = time.perf_counter()
    for name in drawn[:200]:
        view.page((CatalogEntry,), limit=1000, after=name, tenant_id="default")
    page_s = (time.perf_counter() - began_s) / 200
    return [(f"{count:,} names: a lookup, a page of 1,000, bytes a name",
             f"{1e6 * lookup_s:.1f} us, {_ms(page_s)}, {per_name:.0f}")]  # fmt: skip


def _report_bytes() -> tuple[int, int]:
    reporter = DeltaReporter(ReplicaIdentity("store", "{}", 0.0))
    before = tuple(sorted(digest(index) for index in range(255)))
    whole = reporter.next_delta(ReplicaReport("EngineReplica#00000001", resident=before))
    change = reporter.next_delta(
        ReplicaReport("EngineReplica#00000001", resident=tuple(sorted([*before[1:], digest(999)])))
    )
    return len(pickle.dumps(whole)), len(pickle.dumps(change))


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the load")
    parser.add_argument("--names", type=int, default=1_000_000, help="registered names")
    chosen = parser.parse_args(arguments)
    rows = names(chosen.names)  # first: memory is counted by its peak
    rows += asyncio.run(scale(chosen.seconds))
    rows += asyncio.run(thousand())
    rows += run_virtually(herd(chosen.seconds))
    print("| what | measured |\n|---|---|")
    for what, measured in rows:
        print(f"| {what} | {measured} |")


if __name__ == "__main__":
    main()
