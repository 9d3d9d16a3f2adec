"""Replicas that compute on a clock of CPU seconds, and the line through their steps."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from app.engine.config import EngineConfig
from app.engine.cpu.rows import PreparedRows
from app.engine.models.hf_config import spec_from_config
from app.engine.pools.adapter_pool import rows_of
from app.simulation.costs import read_costs
from app.simulation.traffic import Traffic
from load_tests.engine.adapter_memory import MODELS, Case, adapter_of
from load_tests.simulate.against import SIZE, of_real, of_simulated, table
from load_tests.simulate.measure import fit
from load_tests.simulate.real import CONFIG, RANKS, Step, measure_fleet, trace
from load_tests.virtual_time import run_virtually
from tests.deployments.fleet import LIMITS
from tests.fakes import FakeBackend, fake_adapter

ADAPTERS = [fake_adapter(f"a{index}", 8) for index in range(12)]


def some_traffic(count: int = 60) -> Traffic:
    rng = np.random.default_rng(0)
    return Traffic(
        arrival_s=np.cumsum(rng.exponential(0.05, count)),
        adapter=rng.integers(-1, len(ADAPTERS), count),
        prompt_tokens=rng.integers(2, 20, count),
        output_tokens=rng.integers(1, 8, count),
        tenant=rng.integers(0, 2, count),
        rank=np.full(len(ADAPTERS), 8, np.int64),
    )


def test_every_request_is_answered_and_every_step_is_written_down() -> None:
    traffic = some_traffic()
    config = EngineConfig(speculation="off", prefix_cache=False)
    measured = run_virtually(measure_fleet([FakeBackend(LIMITS), FakeBackend(LIMITS)], config, ADAPTERS, traffic))
    assert (measured.first_token_s > 0).all()
    assert (measured.total_s >= measured.first_token_s).all()
    assert measured.end_s >= traffic.arrival_s[-1]
    assert measured.num_starts == int((traffic.adapter >= 0).sum())
    assert 0 < measured.num_loads <= measured.num_starts
    assert all(step.seconds > 0 for step in measured.steps)
    num_computed = sum(step.num_decoding + step.num_prompt for step in measured.steps)
    assert num_computed == int((traffic.prompt_tokens + traffic.output_tokens - 1).sum())
    assert sum(step.num_written for step in measured.steps) == 8 * measured.num_loads
    assert max(step.num_rows for step in measured.steps) >= 8


def test_a_simulated_adapter_takes_as_large_a_part_of_the_rows_as_a_real_one() -> None:
    spec = spec_from_config(MODELS["SmolLM2-135M"], "SmolLM2-135M", "")
    for rank in RANKS:
        case = Case("SmolLM2-135M", "every linear module", (), rank=rank)
        num_needed = PreparedRows(spec).of(adapter_of(case, spec, ml_dtypes.bfloat16)).num_rows
        real, simulated = rows_of(num_needed, 1), rows_of(rank, SIZE.rank_alignment)
        assert real / CONFIG.adapter_rank_rows == simulated / SIZE.adapter_rank_rows


def test_the_line_through_steps_is_found_past_those_that_the_machine_held_up() -> None:
    rng = np.random.default_rng(1)
    steps = []
    for index in range(400):
        decoding, rows, prompt, written = (int(n) for n in rng.integers(0, (16, 128, 64, 32)))
        prompt, written = prompt * (index % 3 == 0), written * (index % 7 == 0)
        seconds = 0.01 + 0.002 * decoding + 0.0001 * rows + 0.003 * prompt + 0.0002 * written
        steps.append(Step(decoding, rows, prompt, written, seconds * (5.0 if index % 50 == 0 else 1.0)))
    found = fit(steps, read_costs())
    assert found.step_s == pytest.approx(0.01, rel=0.05)
    assert found.sequence_s == pytest.approx(0.002, rel=0.05)
    assert found.row_s == pytest.approx(0.0001, rel=0.05)
    assert found.prompt_token_s == pytest.approx(0.003, rel=0.05)
    assert found.row_write_s == pytest.approx(0.0002, rel=0.1)
    assert found.disk_s == read_costs().disk_s, "what steps do not show is taken over"


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps are too few"):
        fit([Step(1, 0, 0, 0, 0.1)] * 3, read_costs())


def test_the_table_says_how_far_the_simulation_is_off() -> None:
    real = {"tokens_per_s": 100.0, "ttft_p50_s": 0.1, "ttft_p99_s": 0.5, "loads_per_request": 0.2}
    simulated = real | {"ttft_p99_s": 0.45}
    lines = table([(real, simulated)]).splitlines()
    assert "| 1 | TTFT p99, s | 0.5 | 0.45 | -10.0 % |" in lines
    assert "| all | TTFT p99, s | | | -10.0 % |" in lines


def test_a_trace_is_the_same_for_its_seed() -> None:
    one, again, other = trace(1, 6.0, 20.0), trace(1, 6.0, 20.0), trace(2, 6.0, 20.0)
    assert (one.arrival_s == again.arrival_s).all()
    assert not np.array_equal(one.adapter, other.adapter)
    found = of_simulated(one, read_costs(), 2, 1)
    assert found.keys() == of_real_keys()


def of_real_keys() -> set[str]:
    traffic = some_traffic(8)
    config = EngineConfig(speculation="off")
    return {*of_real(run_virtually(measure_fleet([FakeBackend(LIMITS)], config, ADAPTERS, traffic)), traffic)}
