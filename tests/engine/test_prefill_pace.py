"""How many prompt tokens share a step with streams that decode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.prefill_pace import PrefillPace
from app.engine.prefill_split import MIN_SHARE
from app.engine.request import SamplingParams
from tests.fakes import FakeBackend, fake_request

ROOM = 100_000


@given(
    base_s=st.floats(0.0, 0.05),
    token_s=st.floats(1e-5, 2e-3),
    num_decoding=st.integers(1, 32),
    first=st.integers(17, 256),
)
def test_steps_settle_at_the_target(base_s: float, token_s: float, num_decoding: int, first: int) -> None:
    pace = PrefillPace(0.1)
    pace.observe(first, base_s + token_s * first)
    for _ in range(60):
        num_tokens = num_decoding + pace.max_tokens(num_decoding, ROOM)
        time_s = base_s + token_s * num_tokens
        pace.observe(num_tokens, time_s)
    least = base_s + token_s * (num_decoding + max(num_decoding, MIN_SHARE))
    assert time_s == pytest.approx(max(0.1, least), abs=2 * token_s + 0.001)


def test_prompts_go_on_however_slow_steps_are() -> None:
    pace = PrefillPace(0.1)
    pace.observe(32, 30.0)
    assert [pace.max_tokens(n, ROOM) for n in (1, 16, 40)] == [MIN_SHARE, 16, 40]
    assert [pace.max_tokens(n, 20) for n in (1, 16, 40)] == [16, 16, 20]


def test_one_slow_step_is_forgotten() -> None:
    pace = PrefillPace(0.1)
    for _ in range(20):
        pace.observe(100, 0.1)
    pace.observe(100, 2.0)
    assert pace.max_tokens(4, ROOM) < 30
    for _ in range(12):
        num_tokens = 4 + pace.max_tokens(4, ROOM)
        pace.observe(num_tokens, num_tokens * 0.001)
    assert pace.max_tokens(4, ROOM) > 80


def test_nothing_is_held_back_for_nobody_or_without_a_target() -> None:
    pace, free = PrefillPace(0.1), PrefillPace(0.0)
    assert pace.max_tokens(8, 256) == MIN_SHARE, "nothing is known yet"
    for each in (pace, free):
        each.observe(256, 10.0)
    assert pace.max_tokens(0, 256) == 256
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
    config = EngineConfig(prefill_step_ms=target_ms, max_batch_tokens=256)
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
