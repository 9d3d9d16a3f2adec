"""How many prompt tokens share a step with streams that decode, and how prompts share them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import SamplingParams
from app.engine.scheduling.chunked_prefill import MIN_SHARE, PrefillBudget, fill_prefill, split_prefill
from app.engine.sequence import Sequence
from tests.fakes import FakeBackend, fake_request, fake_spec

ROOM = 100_000


class Machine:
    """Steps that take a base time and a time per token, of streams or prompts."""

    def __init__(self, prefill_budget: PrefillBudget, base_s: float, token_s: float) -> None:
        self._prefill_budget, self._base_s, self._token_s = prefill_budget, base_s, token_s
        self.num_tokens = 0

    def alone_s(self, num_decoding: int) -> float:
        return self._base_s + self._token_s * num_decoding

    def decode(self, num_decoding: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self._prefill_budget.observe(num_decoding, 0, self.alone_s(num_decoding))

    def step(self, num_decoding: int, room: int = ROOM) -> float:
        """Seconds of a step with as many prompt tokens as the prefill_budget allows."""
        self.num_tokens = self._prefill_budget.max_tokens(num_decoding, room)
        time_s = self.alone_s(num_decoding) + self._token_s * self.num_tokens
        self._prefill_budget.observe(num_decoding, self.num_tokens, time_s)
        return time_s


@given(
    base_s=st.floats(0.0, 0.4), token_s=st.floats(1e-5, 2e-3), num_decoding=st.integers(1, 32),
    first=st.integers(17, 256), has_decoded=st.booleans(),
)  # fmt: skip
@example(base_s=0.09765625, token_s=1e-5, num_decoding=1, first=17, has_decoded=False)
def test_steps_settle_at_the_target_or_at_twice_decoding(
    base_s: float, token_s: float, num_decoding: int, first: int, has_decoded: bool
) -> None:
    prefill_budget = PrefillBudget(0.1)
    machine = Machine(prefill_budget, base_s, token_s)
    machine.step(0, first)
    if has_decoded:
        machine.decode(num_decoding, 3)
    for _ in range(500):
        time_s = machine.step(num_decoding)
    alone_s = machine.alone_s(num_decoding)
    least_s = alone_s + token_s * max(num_decoding, MIN_SHARE)
    # Only whole tokens are taken in; until decoding was seen alone, one seems to take its share of the whole step.
    one_token_s = token_s if has_decoded else 0.1 / (machine.num_tokens + 1)
    expected_s = max(0.1, least_s, 2 * alone_s * has_decoded)
    assert time_s == pytest.approx(expected_s, abs=one_token_s + token_s + 0.001)


def test_prompts_go_on_however_slow_steps_are() -> None:
    prefill_budget = PrefillBudget(0.1)
    prefill_budget.observe(0, 32, 30.0)
    assert [prefill_budget.max_tokens(n, ROOM) for n in (1, 16, 40)] == [MIN_SHARE, 16, 40]
    assert [prefill_budget.max_tokens(n, 20) for n in (1, 16, 40)] == [16, 16, 20]


@pytest.mark.parametrize("is_alone", [True, False])
def test_one_slow_step_is_forgotten(is_alone: bool) -> None:
    prefill_budget = PrefillBudget(0.1)
    machine = Machine(prefill_budget, 0.0, 0.001)
    machine.step(0, 256)
    machine.decode(4, 9)
    for _ in range(10):
        machine.step(4)
    prefill_budget.observe(4, 0 if is_alone else 96, 2.0)
    if is_alone:
        assert machine.step(4) < 0.11
    else:
        assert machine.num_tokens > prefill_budget.max_tokens(4, ROOM)
    for _ in range(12):
        machine.step(4)
    assert 85 < machine.num_tokens <= 97


def test_what_many_took_is_not_taken_for_what_few_do() -> None:
    """With half of the streams gone and no step without prompts since, no step is longer for it."""
    prefill_budget = PrefillBudget(0.1)
    machine = Machine(prefill_budget, 0.0, 0.002)
    machine.step(0, 256)
    machine.decode(40, 9)
    machine.step(40)
    assert max(machine.step(2) for _ in range(20)) < 0.11


def test_nothing_is_held_back_for_nobody_or_without_a_target() -> None:
    prefill_budget, free = PrefillBudget(0.1), PrefillBudget(0.0)
    assert prefill_budget.max_tokens(8, 256) == MIN_SHARE, "nothing is known yet"
    for each in (prefill_budget, free):
        each.observe(0, 256, 10.0)
    assert prefill_budget.max_tokens(0, 256) == 256
    assert free.max_tokens(8, 248) == 248


class SlowBackend(FakeBackend):
    """A millisecond per token, on a clock of its own."""

    now_s = 0.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now_s += 0.001 * len(batch.token_ids)
        return super().forward(batch)


@pytest.mark.parametrize(("target_ms", "longest_s"), [(0, 0.256), (50, 0.050), (5, 0.020)])
def test_a_long_prompt_beside_streams(target_ms: int, longest_s: float) -> None:
    backend = SlowBackend(BackendLimits(128, 8, 0, 8, 1))
    config = EngineConfig(target_step_ms=target_ms, max_num_batched_tokens=256)
    engine = Engine(backend, config, clock=lambda: backend.now_s)
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    for i in range(4):
        engine.submit(fake_request(f"s{i}", [i], sampling=sampling))
    for _ in range(5):
        engine.step()
    engine.submit(fake_request("long", [1] * 400, sampling=SamplingParams(max_tokens=1)))
    steps_s, is_answered = [], False
    while not is_answered:
        started_s = backend.now_s
        is_answered = any(chunk.request_id == "long" for chunk in engine.step())
        steps_s.append(backend.now_s - started_s)
    assert max(steps_s) == pytest.approx(longest_s)


def prompt(tokens: int, tenant_id: str) -> Sequence:
    return Sequence(fake_request("r", [1] * tokens, tenant_id=tenant_id), None, fake_spec(), 8)


_prompts = st.lists(st.builds(prompt, st.integers(1, 200), st.sampled_from("abc")), max_size=8)


@given(_prompts, st.integers(0, 300), st.sets(st.sampled_from("abcd")))
def test_the_budget_is_kept_and_spent(prompts: list[Sequence], budget: int, waiting: set[str]) -> None:
    counts = split_prefill(prompts, budget, waiting)
    assert sum(counts) <= budget
    if prompts and budget:
        assert counts[0] > 0, "the oldest always goes on"
    fill_prefill(prompts, counts, budget - sum(counts))
    assert sum(counts) == min(budget, sum(each.num_pending for each in prompts))
    assert all(0 <= count <= each.num_pending for count, each in zip(counts, prompts, strict=True))


def test_tenants_get_equal_shares_and_the_oldest_of_one_at_most_half() -> None:
    prompts = [prompt(500, "a"), prompt(500, "a"), prompt(500, "b")]
    assert split_prefill(prompts, 128, set()) == [32, 32, 64]
    assert split_prefill(prompts, 120, {"c"}) == [20, 20, 40]
    assert split_prefill(prompts, 120, {"b"}) == [30, 30, 30]
    assert split_prefill(prompts[:1], 128, set()) == [128]
    assert split_prefill(prompts[:1], 128, {"a"}) == [64]


def test_many_waiting_tenants_leave_a_useful_chunk() -> None:
    waiting = {f"t{index}" for index in range(100)}
    assert split_prefill([prompt(500, "a")], 128, waiting) == [MIN_SHARE]
