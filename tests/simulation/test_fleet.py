"""A simulated fleet: nothing is lost, the same seed gives the same run, and policies differ as they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.config import PlacementConfig
from app.deployments.placement.autoscaling import Objective
from app.simulation.costs import read_costs
from app.simulation.fleet import Plan, simulate
from app.simulation.replica import ReplicaSize
from app.simulation.result import Interval, Result, intervals
from app.simulation.scaling import Scaling
from app.simulation.trace import TraceEntry
from app.simulation.traffic import Traffic, from_trace

SIZE = ReplicaSize(lora_pool_rows=64, rank_alignment=16, max_loras=5)
PLAN = Plan(4, read_costs(), SIZE)


def traffic(num_requests: int = 600, *, rate: float = 12.0, num_adapters: int = 24, seed: int = 0) -> Traffic:
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, num_adapters + 1)
    return Traffic(
        arrival_s=np.cumsum(rng.exponential(1 / rate, num_requests)),
        adapter=rng.choice(num_adapters, num_requests, p=weights / weights.sum()) - (rng.random(num_requests) < 0.1),
        prompt_tokens=rng.geometric(1 / 32, num_requests),
        output_tokens=rng.geometric(1 / 16, num_requests),
        tenant=rng.integers(0, 2, num_requests),
        rank=np.full(num_adapters, 16, np.int64),
    )


def run(plan: Plan = PLAN, seed: int = 0) -> Result:
    return simulate(traffic(seed=seed), plan, seed)


def test_every_request_ends_and_every_start_with_an_adapter_is_a_hit_or_a_load() -> None:
    result = run()
    assert result.num_lost == 0
    assert (result.total_s >= result.first_token_s).all()
    assert (result.first_token_s > 0).all()
    assert result.num_hits + result.num_loads == int((result.traffic.adapter >= 0).sum())
    assert result.num_loads - result.num_unloads <= 4 * 4, "what was written and not evicted fits the slots"


def test_a_run_is_the_same_with_the_same_seed() -> None:
    first, again, other = run(), run(), run(seed=1)
    assert np.array_equal(first.first_token_s, again.first_token_s)
    assert first.summary() == again.summary()
    assert first.summary() != other.summary()


def test_keeping_adapters_where_their_rows_are_loads_less_than_sending_them_anywhere() -> None:
    rates = {name: run(replace(PLAN, placement=PlacementConfig(policy=name))).summary()["hit_rate"]
             for name in ("sticky", "least_loaded")}  # fmt: skip
    assert rates["sticky"] > rates["least_loaded"] + 0.2


def test_a_fleet_without_adapters_reads_and_moves_nothing() -> None:
    plain = traffic()
    summary = simulate(replace(plain, adapter=np.full_like(plain.adapter, -1)), PLAN, 0).summary()
    assert summary["loads_per_1000"] == summary["route_changes"] == summary["disk_reads_per_1000"] == 0


def test_a_lost_replica_loses_no_request() -> None:
    result = run(replace(PLAN, lost_s=(10.0, 20.0)))
    assert result.num_lost == 0
    assert result.num_moved > 0
    assert min(tick.num_replicas for tick in result.ticks) < 4


def test_two_homes_cost_loads_and_spare_them_when_a_replica_is_lost() -> None:
    one, two = (
        run(replace(PLAN, placement=PlacementConfig(min_replicas_per_adapter=count))).summary() for count in (1, 2)
    )
    assert two["loads_per_1000"] > one["loads_per_1000"]


def test_replicas_follow_a_crowd_and_leave_again() -> None:
    calm, crowd = traffic(300, rate=2.0), traffic(900, rate=60.0, seed=1)
    times = np.concatenate([calm.arrival_s, crowd.arrival_s + 40.0])
    order = np.argsort(times)
    both = Traffic(
        arrival_s=times[order],
        adapter=np.concatenate([calm.adapter, crowd.adapter])[order],
        prompt_tokens=np.concatenate([calm.prompt_tokens, crowd.prompt_tokens])[order],
        output_tokens=np.concatenate([calm.output_tokens, crowd.output_tokens])[order],
        tenant=np.concatenate([calm.tenant, crowd.tenant])[order],
        rank=calm.rank,
    )
    costs = replace(read_costs(), start_s=2.0)
    scaling = Scaling(1, 6, Objective(scale_down_window_s=10.0, forecast_s=2.0))
    result = simulate(both, replace(PLAN, num_replicas=1, costs=costs, scaling=scaling), 0)
    counts = [tick.num_replicas for tick in result.ticks]
    assert result.num_lost == 0
    assert max(counts) >= 4
    assert counts[-1] < max(counts)
    assert 0 < len(result.scalings) <= 30


def test_prompts_that_begin_alike_go_where_that_is_cached() -> None:
    plain = traffic(800, rate=6.0)
    rng = np.random.default_rng(0)
    alike = replace(
        plain, adapter=np.full_like(plain.adapter, -1), prompt_tokens=plain.prompt_tokens + 400,
        prefix=rng.integers(-1, 60, 800), prefix_tokens=np.full(60, 400, np.int64),
    )  # fmt: skip
    off, on = (
        simulate(alike, replace(PLAN, placement=PlacementConfig(prefix_affinity=is_on)), 0).summary()
        for is_on in (False, True)
    )
    assert on["cached_share"] > off["cached_share"] + 0.1
    assert on["ttft_p50_s"] < off["ttft_p50_s"]
    assert on["lost"] == off["lost"] == 0
    one_each = simulate(replace(alike, tenant=np.arange(800)), PLAN, 0).summary()
    assert one_each["cached_share"] == 0, "nothing of another tenant's is found"


def test_means_have_intervals() -> None:
    found = intervals([{"x": value} for value in (1.0, 2.0, 3.0)])
    assert found["x"].mean == 2.0
    assert found["x"].plus_minus == pytest.approx(4.30 / 3**0.5)
    assert str(Interval(123.4, 1.6)) == "123 ± 2"
    assert str(intervals([{"x": 1.0}, {"x": float("inf")}])["x"]) == "–"


def test_a_trace_is_traffic() -> None:
    entries = [TraceEntry(0.0, "b", 7, 3, "x"), TraceEntry(1.0), TraceEntry(2.0, "a", tenant="w")]
    found = from_trace(entries, rank=16, prompt_tokens=64, output_tokens=32)
    assert found.adapter.tolist() == [1, -1, 0]
    assert found.prompt_tokens.tolist() == [7, 64, 64]
    assert found.output_tokens.tolist() == [3, 32, 32]
    assert found.tenant.tolist() == [1, 0, 0]
    assert found.classes() == ["hot", "warm"]
    assert simulate(found, PLAN, 0).num_lost == 0
