"""Replicas that compute on a clock of CPU seconds, and the line through their steps."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.cpu.adapter_layout import AdapterLayoutCache
from app.engine.models.hf.config import spec_from_config
from app.engine.pools.adapter_pool import rows_of
from app.simulation.costs import Costs, read_costs
from app.simulation.fleet import Plan, simulate
from app.simulation.result import percentile
from app.simulation.traffic import Traffic
from load_tests.engine.adapter_memory import MODELS, Case, adapter_of
from load_tests.simulate.measure import fit
from load_tests.simulate.real_fleet import CONFIG, NUM_ADAPTERS, RANKS, Step, measure_fleet, trace
from load_tests.simulate.validate_simulator import SIZE, of_real, of_simulated, table
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
    config = EngineConfig(speculative_decoding="off", enable_prefix_caching=False)
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
        num_needed = AdapterLayoutCache(spec).of(adapter_of(case, spec, ml_dtypes.bfloat16)).num_rows
        real, simulated = rows_of(num_needed, 1), rows_of(rank, SIZE.rank_alignment)
        assert real / CONFIG.lora_pool_rows == simulated / SIZE.lora_pool_rows


def test_the_line_through_steps_is_found_past_those_that_the_machine_held_up() -> None:
    rng = np.random.default_rng(1)
    steps = []
    for index in range(400):
        decoding, rows, prompt, written = (int(n) for n in rng.integers(0, (16, 128, 64, 32)))
        prompt, written = prompt * (index % 3 == 0), written * (index % 7 == 0)
        looks = prompt * (prompt + 1) // 2 + prompt * int(rng.integers(0, 100))
        seconds = 0.01 + 0.002 * decoding + 0.0001 * rows + 0.003 * prompt + 0.00001 * looks + 0.0002 * written
        steps.append(Step(decoding, rows, prompt, looks, written, seconds * (5.0 if index % 50 == 0 else 1.0)))
    found = fit(steps, read_costs())
    assert found.step_s == pytest.approx(0.01, rel=0.05)
    assert found.sequence_s == pytest.approx(0.002, rel=0.05)
    assert found.row_s == pytest.approx(0.0001, rel=0.05)
    assert found.prompt_token_s == pytest.approx(0.003, rel=0.05)
    assert found.look_s == pytest.approx(0.00001, rel=0.05)
    assert found.row_write_s == pytest.approx(0.0002, rel=0.1)
    assert found.disk_s == read_costs().disk_s, "what steps do not show is taken over"


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps are too few"):
        fit([Step(1, 0, 0, 0, 0, 0.1)] * 3, read_costs())


def test_the_line_through_uneven_steps_is_their_mean() -> None:
    """A queue adds times up: a line below their mean makes all waits too short."""
    rng = np.random.default_rng(2)
    steps = []
    for _ in range(2000):
        decoding, rows, prompt, written = (int(n) for n in rng.integers(1, (16, 128, 64, 32)))
        mean_s = 0.01 + 0.002 * decoding + 0.0001 * rows + 0.003 * prompt + 0.0002 * written
        steps.append(Step(decoding, rows, prompt, 0, written, mean_s * rng.gamma(25.0) / 25))
    costs = fit(steps, read_costs())
    line_s = sum(costs.decode_s(s.num_decoding, s.num_rows) + costs.prompt_token_s * s.num_prompt
                 + costs.row_write_s * s.num_written for s in steps)  # fmt: skip
    assert line_s == pytest.approx(sum(step.seconds for step in steps), rel=0.005)


class TimedBackend(FakeBackend):
    """Computes nothing worth measuring: steps and writes last what a table says, by a clock of its own."""

    def __init__(self, limits: BackendLimits, costs: Costs, clock: list[float]) -> None:
        super().__init__(limits)
        self._costs, self._clock = costs, clock
        self._ranks = {0: 0}

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        super().write_adapter(adapter_slot, row_start, adapter)
        self._ranks[adapter_slot] = adapter.card.max_rank
        self._clock[0] += self._costs.row_write_s * adapter.card.max_rank

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        counts, starts = np.diff(batch.query_starts), batch.query_starts[:-1]
        num_rows = sum(self._ranks[slot] for slot in {*batch.run_adapter_slots.tolist()})
        self._clock[0] += self._costs.decode_s(int((counts == 1).sum()), num_rows)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            self._clock[0] += self._costs.prompt_s(int(batch.positions[start]), count) if count > 1 else 0.0
        return super().forward(batch)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_steps_last_what_the_table_says_each_request_is_simulated_as_it_is(seed: int) -> None:
    """A real engine, its reports, placement and ingress beside simulated ones. It is one replica, since a second home
    depends on the moments of reports. What is left is a prompt's token that goes into the step before or after."""
    traffic = trace(seed, 3.0, 60.0)
    ranks = [RANKS[index % len(RANKS)] for index in range(NUM_ADAPTERS)]
    adapters = [fake_adapter(f"a{index}", rank) for index, rank in enumerate(ranks)]
    adapters = [replace(adapter, card=replace(adapter.card, digest=digest))
                for adapter, digest in zip(adapters, traffic.digests(), strict=True)]  # fmt: skip
    costs = replace(
        read_costs(), step_s=0.0115, sequence_s=0.00225, prompt_token_s=0.0024, look_s=4e-6, row_write_s=1.4e-4,
        host_s=0.0, disk_s=0.0, source_s=0.0,
    )  # fmt: skip
    clock = [0.0]
    limits = BackendLimits(CONFIG.num_kv_blocks, CONFIG.block_size, SIZE.lora_pool_rows, 8, CONFIG.max_loras)
    backend = TimedBackend(limits, costs, clock)
    real = run_virtually(measure_fleet([backend], CONFIG, adapters, traffic, seed, lambda: clock[0]))
    simulated = simulate(traffic, Plan(1, costs, SIZE), seed)
    away = np.abs(simulated.first_token_s - real.first_token_s)
    assert (away < 0.001).mean() > 0.95
    for part in (50, 90, 99):
        expected = percentile(real.first_token_s, part)
        assert percentile(simulated.first_token_s, part) == pytest.approx(expected, rel=0.01)
    assert simulated.num_loads == real.num_loads


def test_the_table_says_how_far_the_simulation_is_off() -> None:
    real = {"tokens_per_s": 100.0, "ttft_p50_s": 0.1, "ttft_p99_s": 0.5, "loads_per_request": 0.2}
    simulated = real | {"ttft_p99_s": 0.45}
    lines = table([("1", real, simulated)]).splitlines()
    assert "| 1 | TTFT p99, s | 0.5 | 0.45 | -10.0 % |" in lines


def test_a_trace_is_the_same_for_its_seed() -> None:
    one, again, other = trace(1, 6.0, 20.0), trace(1, 6.0, 20.0), trace(2, 6.0, 20.0)
    assert (one.arrival_s == again.arrival_s).all()
    assert not np.array_equal(one.adapter, other.adapter)
    found = of_simulated([simulate(one, Plan(2, read_costs(), SIZE), seed) for seed in (1, 2)])
    assert found.keys() == of_real_keys()


def of_real_keys() -> set[str]:
    traffic = some_traffic(8)
    config = EngineConfig(speculative_decoding="off")
    return {*of_real([(run_virtually(measure_fleet([FakeBackend(LIMITS)], config, ADAPTERS, traffic)), traffic)])}
