"""The lowest class: batches' sequences take what others leave, and no answer waits for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import GenerateRequest, SamplingParams
from tests.fakes import FakeBackend, fake_request, fake_tokens

ROOM = BackendLimits(512, 8, 0, 8, 1)


class Bench:
    """An engine, and in which step each of its requests drew its first and its last token."""

    def __init__(self, limits: BackendLimits = ROOM, **config: int | bool) -> None:
        self.engine = Engine(FakeBackend(limits), EngineConfig.model_validate(config), clock=lambda: 0.0)
        self.step = 0
        self.requests: dict[str, GenerateRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.first: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    def submit(self, name: str, *, prompt: int = 8, tokens: int = 4, tenant: str = "a", is_batch: bool = False) -> str:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        ids = [len(self.requests) % 60] * prompt
        request = fake_request(name, ids, sampling=sampling, tenant_id=tenant, is_batch=is_batch)
        self.requests[name], self.tokens[name] = request, []
        self.engine.submit(request)
        return name

    def run(self, num_steps: int, refill: Callable[[], object] = lambda: None) -> None:
        for _ in range(num_steps):
            refill()
            for chunk in self.engine.step():
                assert chunk.error is None
                self.tokens[chunk.request_id] += chunk.token_ids
                self.first.setdefault(chunk.request_id, self.step)
                if chunk.finish_reason is not None:
                    self.ended[chunk.request_id] = self.step
            self.engine.check()
            self.step += 1


def test_whoever_is_waited_for_goes_first() -> None:
    bench = Bench(max_num_seqs=4)
    for index in range(20):
        bench.submit(f"batch{index}", is_batch=True, tenant="a")
    for index in range(12):
        bench.submit(f"r{index}", tenant="ab"[index % 2])
    bench.run(60)
    awaited = [bench.ended[name] for name in bench.requests if name.startswith("r")]
    batches = [bench.ended[name] for name in bench.requests if name.startswith("b")]
    assert max(awaited) < min(batches), "and their own tenant's batches have not cost them their turn"
    assert batches == sorted(batches)


def test_batches_leave_half_of_the_places_free() -> None:
    bench = Bench(max_num_seqs=8)
    for index in range(50):
        bench.submit(f"batch{index}", tokens=40, is_batch=True)
    bench.run(5)
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (4, 46)
    name = bench.submit("r", tenant="b")
    started = bench.step
    bench.run(4)
    assert bench.first[name] == started


def test_a_flood_that_is_waited_for_leaves_batches_nothing_and_they_go_on_after_it() -> None:
    bench = Bench(max_num_seqs=4)
    batch = bench.submit("batch", is_batch=True)
    count = 0

    def flood() -> None:
        nonlocal count
        while bench.engine.stats().num_waiting < 8:
            count += 1
            bench.submit(f"r{count}", tenant="b")

    bench.submit("r0", tenant="b")
    bench.run(30, flood)
    assert batch not in bench.first
    bench.run(40)
    assert batch in bench.ended


@pytest.mark.parametrize("num_blocks", [14, 20, 40])
def test_blocks_run_out_for_batches_first_and_every_token_is_what_it_is_alone(num_blocks: int) -> None:
    bench = Bench(BackendLimits(num_blocks, 8, 0, 8, 1), max_num_seqs=8, enable_prefix_caching=False)
    for index in range(4):
        bench.submit(f"batch{index}", tokens=50, is_batch=True)
    bench.run(2)
    names = [bench.submit(f"r{index}", tokens=30, tenant="b") for index in range(3)]
    bench.run(600)
    for name, request in bench.requests.items():
        assert bench.tokens[name] == [item.token_id for item in fake_tokens(request, None)], name
    if num_blocks == 20:
        assert bench.engine.stats().num_preemptions > 0
    assert max(bench.ended[name] for name in names) < max(bench.ended[f"batch{index}"] for index in range(4))


def test_among_batches_tenants_share() -> None:
    bench = Bench(max_num_seqs=4)
    for index in range(30):
        bench.submit(f"flood{index}", is_batch=True, tenant="a")
    name = bench.submit("one", is_batch=True, tenant="b")
    bench.run(12)
    assert name in bench.ended
