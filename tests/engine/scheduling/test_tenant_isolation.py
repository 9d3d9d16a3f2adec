"""How many tokens a step may have: the bound on one tenant's flood, and what the flood is left all the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import SamplingParams
from app.engine.scheduling.fair_queue import HELD_BLOCK_PRICE, INPUT_PRICE, MAX_LEAD, OUTPUT_PRICE
from app.engine.scheduling.tenant_isolation import StepTimes, TenantIsolation
from app.engine.sequence import Sequence
from tests.budgets import examples
from tests.fakes import FakeBackend, fake_request, fake_spec


def sequences(**num_running: int) -> list[Sequence]:
    """So many running sequences of each tenant."""
    return [
        Sequence(fake_request(f"{tenant}{index}", [1], tenant_id=tenant), None, fake_spec(), 8)
        for tenant, count in num_running.items()
        for index in range(count)
    ]


@given(
    st.floats(0, 1), st.floats(0.001, 1), st.integers(1, 40), st.floats(1, 4), st.sets(st.integers(1, 90), min_size=2)
)
def test_the_largest_step_takes_as_long_as_it_may(
    start_s: float, token_s: float, num_tokens: int, slowdown: float, seen: set[int]
) -> None:
    times = StepTimes()
    for count in seen:
        times.observe(count, start_s + token_s * count)
    max_step_tokens = times.max_step_tokens(num_tokens, slowdown)
    alone_s = start_s + token_s * num_tokens
    assert start_s + token_s * max_step_tokens <= max(alone_s, slowdown * alone_s) * (1 + 1e-6)
    assert max_step_tokens >= num_tokens
    if slowdown > 1:
        assert start_s + token_s * (max_step_tokens + 2) > slowdown * alone_s * (1 - 1e-6), "and no less"


def test_one_measured_size_alone_allows_rather_too_few_tokens() -> None:
    times = StepTimes()
    assert times.max_step_tokens(4, 1.5) == 4, "nothing is known yet"
    times.observe(40, 0.1)
    assert times.max_step_tokens(4, 1.5) == 6
    times.observe(6, 0.05)
    assert times.max_step_tokens(4, 1.5) > 6


def test_who_runs_most_is_held_back_and_never_below_the_others() -> None:
    isolation = TenantIsolation(1.5)
    for num_tokens in (4, 44):
        isolation.observe(num_tokens, 0.010 + 0.0005 * num_tokens)  # 12 ms for 4, 32 ms for 44
    assert isolation.token_limits(sequences(one=4, flood=40)) == {"flood": 12}, "18 ms"
    assert isolation.token_limits(sequences(one=4, flood=4)) == {}
    for num_tokens in (4, 44):
        for _ in range(9):
            isolation.observe(num_tokens, 0.001 * num_tokens)  # a step is all tokens: 1.5 leaves room for 2
    assert isolation.token_limits(sequences(one=4, flood=40)) == {"flood": 4}, "served equally all the same"
    assert isolation.token_limits(sequences(one=1, two=2, flood=9)) == {"flood": 2}
    assert TenantIsolation(0).token_limits(sequences(one=4, flood=40)) == {}


def test_a_tenant_that_comes_back_finds_no_large_step() -> None:
    isolation, flood = TenantIsolation(1.5), sequences(flood=40)
    for num_tokens in (4, 44):
        isolation.observe(num_tokens, 0.001 * num_tokens)
    assert isolation.token_limits(flood) == {}, "it has the engine to itself"
    assert isolation.token_limits(flood, sequences(one=1)) == {"flood": 1}, "who waits is about to run"
    assert isolation.token_limits([*flood, *sequences(one=4)]) == {"flood": 4}
    rooms = [isolation.token_limits(flood).get("flood") for _ in range(20)]
    num_held = rooms.index(None)
    assert 0 < num_held < 20
    assert rooms == [4] * num_held + [None] * (20 - num_held), "for a moment, and then no longer"


def test_who_is_held_back_and_behind_gets_more() -> None:
    isolation = TenantIsolation(1.5)
    for num_tokens in (4, 44):
        isolation.observe(num_tokens, 0.001 * num_tokens)
    running = sequences(one=4, flood=40)
    rooms = [
        isolation.token_limits(running, (), {"one": lead, "flood": 0.0}.__getitem__)["flood"] for lead in (0, 200, 2000)
    ]
    assert rooms[0] == rooms[1] == 4 < rooms[2]


def test_a_place_is_given_by_the_heaviest_while_it_stays_heavier() -> None:
    isolation, heavy = TenantIsolation(1.5), {"flood", "two"}
    (asking,) = sequences(one=1)
    victim = isolation.victim(sequences(two=3, flood=9), asking, heavy)
    assert victim is not None
    assert victim.request_id == "flood8", "its youngest"
    assert isolation.victim(sequences(one=4, flood=5), asking, {"flood"}) is None, "both would have five and four"
    assert isolation.victim(sequences(two=3), asking, {"flood"}) is None
    assert isolation.victim(sequences(flood=9), sequences(flood=1)[0], {"flood"}) is None
    served = {"one": MAX_LEAD, "flood": 0.0}.__getitem__
    assert isolation.victim(sequences(flood=9), asking, {"flood"}, served, 0.0) is not None
    assert isolation.victim(sequences(flood=9), asking, {"flood"}, served, -1.0) is None, (
        "somebody else was served less"
    )
    served = {"one": MAX_LEAD + 1, "flood": 0.0}.__getitem__
    assert isolation.victim(sequences(flood=9), asking, {"flood"}, served) is None, "it waits in fair order"


def test_time_slices_go_round() -> None:
    isolation, waiting = TenantIsolation(1.5), sequences(flood=10)
    counts = dict.fromkeys((each.request_id for each in waiting), 0)
    for _ in range(20):
        for each in isolation.next_time_slices(waiting, 3):
            counts[each.request_id] += 1
    assert set(counts.values()) == {6}


class SteppingBackend(FakeBackend):
    """So many seconds a step, and a token, on a clock of its own."""

    now_s, step_s, token_s = 0.0, 0.010, 0.001

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now_s += self.step_s + self.token_s * len(batch.token_ids)
        return super().forward(batch)


def gaps_ms(slowdown: float, num_flood: int) -> tuple[list[float], int]:
    """One tenant's times between tokens of three answers in a row, its first included, beside a flood that never ends;
    and how many tokens the flood got meanwhile."""
    backend = SteppingBackend(BackendLimits(512, 8, 0, 8, 1))
    engine = Engine(backend, EngineConfig(max_tenant_slowdown=slowdown), clock=lambda: backend.now_s)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    gaps: list[float] = []
    flood: dict[str, int] = {}
    for round_ in range(3):
        for index in range(num_flood):
            name = f"flood{round_}-{index}"
            flood[name] = 0
            request = fake_request(name, [index % 7] * 16, tenant_id="flood", sampling=sampling)
            engine.submit(request)
        for _ in range(4):
            engine.step()
        engine.submit(fake_request(f"one{round_}", [3] * 16, tenant_id="one", sampling=sampling))
        last_s, is_done = backend.now_s, False
        while not is_done:
            for chunk in engine.step():
                if chunk.request_id in flood:
                    flood[chunk.request_id] += len(chunk.token_ids)
                else:
                    gaps.append(1e3 * (backend.now_s - last_s))
                    last_s, is_done = backend.now_s, chunk.finish_reason is not None
    return gaps, sum(flood.values())


def test_a_flood_moves_the_others_by_no_more_than_it_may() -> None:
    """Alone a step of the other tenant's takes 11 ms: 16.5 are allowed."""
    alone, _ = gaps_ms(0.0, 0)
    beside, _ = gaps_ms(0.0, 30)
    held, served = gaps_ms(1.5, 30)
    assert max(alone[1:40]) == pytest.approx(11.0)
    assert sorted(beside)[len(beside) // 2] > 3 * 11.0
    assert max(held[41:80]) <= 1.5 * 11.0 + 1e-9, "once steps of both sizes have been seen"
    assert served >= len(held), "it is served at least equally"


def first_tokens_ms(
    slowdown: float, num_flood: int, num_places: int, scale: tuple[float, float] = (1.0, 1.0)
) -> tuple[list[float], dict[str, float]]:
    """Times to the first token of a tenant that keeps four requests open beside a flood that never ends, and tokens per
    second of both while it does. `scale`: how much longer a step, and a token, takes than `SteppingBackend` says."""
    rng = random.Random(7)
    backend = SteppingBackend(BackendLimits(2048, 8, 0, 8, 1), fake_spec(max_positions=256))
    backend.step_s, backend.token_s = scale[0] * backend.step_s, scale[1] * backend.token_s
    config = EngineConfig(max_tenant_slowdown=slowdown, max_num_seqs=num_places, speculative_decoding="off")
    engine = Engine(backend, config, clock=lambda: backend.now_s)
    sent_s: dict[str, float] = {}
    first_ms: list[float] = []
    num_tokens = dict.fromkeys(("one", "flood"), 0)

    def send(tenant: str) -> None:
        name = f"{tenant}-{len(sent_s)}"
        sent_s[name] = backend.now_s
        sampling = SamplingParams(max_tokens=rng.randint(16, 48), temperature=0.0, ignore_eos=True)
        prompt = [rng.randrange(7) for _ in range(48)]
        engine.submit(fake_request(name, prompt, tenant_id=tenant, sampling=sampling))

    def step() -> None:
        for chunk in engine.step():
            tenant = chunk.request_id.split("-")[0]
            num_tokens[tenant] += len(chunk.token_ids)
            if tenant == "one" and chunk.usage is not None and chunk.finish_reason is None:
                first_ms.append(1e3 * (backend.now_s - sent_s[chunk.request_id]))
            if chunk.finish_reason is not None:
                send(tenant)

    for _ in range(num_flood):
        send("flood")
    for _ in range(120 if num_flood else 0):
        step()
    num_tokens["flood"], start_s = 0, backend.now_s
    for _ in range(4):
        send("one")
    while len(first_ms) < 100:
        step()
    engine._scheduler.check()
    return first_ms, {tenant: number / (backend.now_s - start_s) for tenant, number in num_tokens.items()}


@pytest.mark.parametrize("num_places", [64, 32])
@pytest.mark.parametrize(("scale", "median_bound"), [((1.0, 1.0), 1.5), ((3.0, 2.0), 2.0)])
def test_a_flood_moves_first_tokens_by_no_more_than_it_may(
    num_places: int, scale: tuple[float, float], median_bound: float
) -> None:
    """Where there is a place for everybody, and where the flood has taken all of them.

    Where a prompt takes several steps, which slow ones do, the median may move by more than one step does: up to twice.
    """
    alone, _ = first_tokens_ms(0.0, 0, num_places, scale)
    beside, _ = first_tokens_ms(0.0, 40, num_places, scale)
    held, rates = first_tokens_ms(1.5, 40, num_places, scale)
    for part, bound in ((0.5, median_bound), (0.99, 1.5)):
        assert np.quantile(held, part) <= bound * np.quantile(alone, part)
    assert np.quantile(beside, 0.99) > 1.5 * np.quantile(alone, 0.99), "without it, it does"
    assert rates["flood"] > 0.5 * rates["one"], "the flood goes on"


@pytest.mark.parametrize("slowdown", [0.0, 1.5])
def test_a_flood_of_long_answers_makes_places(slowdown: float) -> None:
    """Every request of another tenant starts within two steps, although the flood's answers take hundreds."""
    backend = SteppingBackend(BackendLimits(2048, 8, 0, 8, 1), fake_spec(max_positions=512))
    config = EngineConfig(max_tenant_slowdown=slowdown, max_num_seqs=8, speculative_decoding="off")
    engine = Engine(backend, config, clock=lambda: backend.now_s)
    lasting = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    brief = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for index in range(40):
        engine.submit(fake_request(f"flood-{index}", [index % 7] * 16, tenant_id="flood", sampling=lasting))
    for _ in range(20):
        engine.step()
    for index in range(30):
        request_id = f"one-{index}"
        engine.submit(fake_request(request_id, [3, index % 7] * 8, tenant_id="one", sampling=brief))
        steps = [[chunk for chunk in engine.step() if chunk.request_id == request_id] for _ in range(10)]
        assert any(chunk.token_ids for chunks in steps[:2] for chunk in chunks), f"request {index} waits"
        assert steps[-1] or steps[-2] or any(chunk.finish_reason for chunks in steps for chunk in chunks)
    engine.check()


class Arriving(NamedTuple):
    """How a tenant sends: so many requests open at most, of so long prompts and answers at most, this often."""

    num_open: int
    max_prompt: int
    max_output: int
    share: float
    weight: float


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_service_of_those_that_wait_stays_within_the_bound_while_places_are_given(data: st.DataObject) -> None:
    """Random arrivals and weights; the lead is as large as a few requests, so that it is reached."""
    slowdown, lead = data.draw(st.sampled_from([0.0, 1.0, 1.5, 4.0])), data.draw(st.sampled_from([32.0, 128.0]))
    num_places, longest, max_output = data.draw(st.integers(4, 8)), 40, 12
    weights = st.sampled_from([0.5, 1.0, 2.0])
    sprinter = Arriving(2, longest, 1, 1.0, data.draw(weights))
    others = st.builds(
        Arriving, st.integers(1, 30), st.integers(1, longest), st.integers(1, max_output), st.floats(0.05, 1), weights
    )
    flood = Arriving(30, longest, max_output, 1.0, data.draw(weights))
    tenants = {"flood": flood, "sprinter": sprinter, "one": data.draw(others), "two": data.draw(others)}
    token = OUTPUT_PRICE + HELD_BLOCK_PRICE * -(-(longest + max_output) // 8)
    running = num_places * max_output * token
    least = min(tenant.weight for tenant in tenants.values())
    bound = 2 * max(INPUT_PRICE * longest, running) / least + lead
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.engine.scheduling.tenant_isolation.MAX_LEAD", lead)
        gaps = service_gaps(slowdown, tenants, num_places, random.Random(data.draw(st.integers(0, 1 << 31))))
    assert max(gaps) <= bound


def service_gaps(slowdown: float, tenants: Mapping[str, Arriving], num_places: int, rng: random.Random) -> list[float]:
    """After each step of an engine with memory for all, where places are what is waited for."""
    backend = SteppingBackend(BackendLimits(512, 8, 0, 8, 1), fake_spec(max_positions=64))
    config = EngineConfig(max_tenant_slowdown=slowdown, max_num_seqs=num_places, speculative_decoding="off")
    engine = Engine(backend, config, clock=lambda: backend.now_s)
    num_open = dict.fromkeys(tenants, 0)
    gaps: list[float] = []
    for step in range(150):
        for name, tenant in tenants.items():
            while num_open[name] < tenant.num_open and rng.random() < tenant.share:
                sampling = SamplingParams(
                    max_tokens=rng.randint(1, tenant.max_output), temperature=0.0, ignore_eos=True
                )
                prompt = [rng.randrange(7) for _ in range(rng.randint(1, tenant.max_prompt))]
                request_id = f"{name}-{step}-{num_open[name]}"
                engine.submit(fake_request(request_id, prompt, tenant_id=name, weight=tenant.weight, sampling=sampling))
                num_open[name] += 1
        for chunk in engine.step():
            num_open[chunk.request_id.split("-")[0]] -= chunk.finish_reason is not None
        gaps.append(engine._scheduler.queue.gap())
    return gaps


@pytest.mark.parametrize("seed", range(20))
def test_a_tenant_whose_only_stream_with_a_time_slice_is_preempted_goes_on(seed: int) -> None:
    """Memory for one or two sequences, and a limit of one token: the step after such a preemption computes others."""
    rng, backend = random.Random(seed), SteppingBackend(BackendLimits(4, 8, 0, 8, 1))
    config = EngineConfig(max_tenant_slowdown=1.0, enable_prefix_caching=False, max_model_len=32)
    engine = Engine(backend, config, clock=lambda: backend.now_s)
    ended: dict[str, Exception | None] = {}
    for index in range(12):
        num_prompt = rng.randint(1, 16)
        sampling = SamplingParams(max_tokens=rng.randint(1, 32 - num_prompt), temperature=0.0, ignore_eos=True)
        tenant_id = rng.choice(["a", "a", "b"])
        engine.submit(fake_request(f"r{index}", [3] * num_prompt, tenant_id=tenant_id, sampling=sampling))
        for _ in range(rng.randint(0, 1)):
            ended |= {chunk.request_id: chunk.error for chunk in engine.step() if chunk.finish_reason is not None}
    for _ in range(1000):
        ended |= {chunk.request_id: chunk.error for chunk in engine.step() if chunk.finish_reason is not None}
    assert ended == {f"r{index}": None for index in range(12)}
    engine.check()
