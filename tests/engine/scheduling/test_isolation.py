"""How wide a step may be: the bound that one tenant's flood is held to, and what the flood is left all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import SamplingParams
from app.engine.scheduling.isolation import Isolation, StepTimes
from app.engine.sequence import Sequence
from tests.fakes import FakeBackend, fake_request, fake_spec


def sequences(**widths: int) -> list[Sequence]:
    """So many running sequences of each tenant."""
    return [
        Sequence(fake_request(f"{tenant}{index}", [1], tenant_id=tenant), None, fake_spec(), 8)
        for tenant, width in widths.items()
        for index in range(width)
    ]


@given(
    st.floats(0, 1), st.floats(0.001, 1), st.integers(1, 40), st.floats(1, 4), st.sets(st.integers(1, 90), min_size=2)
)
def test_the_widest_step_takes_as_long_as_it_may(
    start_s: float, token_s: float, num_tokens: int, slowdown: float, seen: set[int]
) -> None:
    times = StepTimes()
    for width in seen:
        times.observe(width, start_s + token_s * width)
    widest = times.widest(num_tokens, slowdown)
    alone_s = start_s + token_s * num_tokens
    assert start_s + token_s * widest <= max(alone_s, slowdown * alone_s) * (1 + 1e-6)
    assert widest >= num_tokens
    if slowdown > 1:
        assert start_s + token_s * (widest + 2) > slowdown * alone_s * (1 - 1e-6), "and no less"


def test_one_width_alone_errs_to_the_narrow_side() -> None:
    times = StepTimes()
    assert times.widest(4, 1.5) == 4, "nothing is known yet"
    times.observe(40, 0.1)
    assert times.widest(4, 1.5) == 6
    times.observe(6, 0.05)
    assert times.widest(4, 1.5) > 6


def test_who_runs_most_is_held_back_and_never_below_the_others() -> None:
    isolation = Isolation(1.5)
    for width in (4, 44):
        isolation.observe(width, 0.010 + 0.0005 * width)  # 12 ms for 4, 32 ms for 44
    assert isolation.wide(sequences(one=4, flood=40)) == {"flood": 12}, "18 ms"
    assert isolation.wide(sequences(one=4, flood=4)) == {}
    assert isolation.wide(sequences(flood=40)) == {}
    for width in (4, 44):
        for _ in range(9):
            isolation.observe(width, 0.001 * width)  # a step is all tokens: 1.5 leaves room for 2
    assert isolation.wide(sequences(one=4, flood=40)) == {"flood": 4}, "served equally all the same"
    assert isolation.wide(sequences(one=1, two=2, flood=9)) == {"flood": 2}
    assert Isolation(0).wide(sequences(one=4, flood=40)) == {}


def test_turns_go_round() -> None:
    isolation, waiting = Isolation(1.5), sequences(flood=10)
    counts = dict.fromkeys((each.request_id for each in waiting), 0)
    for _ in range(20):
        for each in isolation.turn(waiting, 3):
            counts[each.request_id] += 1
    assert set(counts.values()) == {6}


class SteppingBackend(FakeBackend):
    """10 ms a step and 1 ms a token, on a clock of its own."""

    now_s = 0.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now_s += 0.010 + 0.001 * len(batch.token_ids)
        return super().forward(batch)


def gaps_ms(slowdown: float, num_flood: int) -> tuple[list[float], int]:
    """One tenant's times between tokens of three answers in a row, its first included, beside a flood that never ends;
    and how many tokens the flood got meanwhile."""
    backend = SteppingBackend(BackendLimits(512, 8, 0, 8, 1))
    engine = Engine(backend, EngineConfig(tenant_slowdown=slowdown), clock=lambda: backend.now_s)
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
    assert max(held[41:80]) <= 1.5 * 11.0 + 1e-9, "once both widths have been seen"
    assert served >= len(held), "it is served at least equally"
