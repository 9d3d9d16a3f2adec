"""Scaling by requests is what Ray Serve does, and by demand what the service does, with the same delays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.serve.autoscaling_policy import _apply_delay_logic, replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from app.deployments.placement.view import PlacementView
from app.simulation.costs import read_costs
from app.simulation.fleet import Plan, simulate
from app.simulation.replica import Replica, ReplicaSize, SimulatedRequest
from app.simulation.scaling import Delay, QueueLength, Scaler, Scaling
from tests.simulation.test_fleet import PLAN, traffic


@pytest.mark.parametrize("delays", [(0.0, 0.0), (3.0, 7.0), (30.0, 600.0)])
@pytest.mark.parametrize("seed", range(5))
def test_delays_are_those_of_serve(delays: tuple[float, float], seed: int) -> None:
    up_s, down_s = delays
    scaling = Scaling(1, 8, upscale_delay_s=up_s, downscale_delay_s=down_s)
    config = AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=up_s, downscale_delay_s=down_s)
    rng, ours, state = np.random.default_rng(seed), Delay(scaling), dict[str, Any]()
    target, wanted, seen = 1, 1, set()
    for second in range(1500):
        if rng.random() < 0.1:
            wanted = int(rng.integers(1, 9))
        theirs, state = _apply_delay_logic(wanted, target, config, state, float(second))
        assert ours.apply(wanted, target, float(second)) == theirs
        target = theirs
        seen.add(target)
    assert len(seen) > 1


def given(num_jobs: int) -> Replica:
    """A replica with so many requests."""
    replica = Replica("r", 0.0, read_costs(), ReplicaSize())
    replica.jobs = {index: SimulatedRequest(index, 0.0, -1, None, 0, 10, 5, "t", 1.0) for index in range(num_jobs)}
    return replica


@pytest.mark.parametrize("counts", [(0,), (1,), (4,), (5, 0), (9, 3, 1)])
def test_as_many_replicas_are_wanted_as_serve_wants(counts: tuple[int, ...]) -> None:
    config = AutoscalingConfig(min_replicas=1, max_replicas=99, target_ongoing_requests=2.0)
    context = AutoscalingContext(
        deployment_id=None, deployment_name="d", app_name="a", current_num_replicas=len(counts),
        target_num_replicas=len(counts), running_replicas=[], total_num_requests=float(sum(counts)),
        total_queued_requests=0.0, aggregated_metrics={}, raw_metrics={}, capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=99, policy_state={}, last_scale_up_time=None, last_scale_down_time=None,
        current_time=0.0, config=config,
    )  # fmt: skip
    theirs, _ = replica_queue_length_autoscaling_policy(context)
    scaler = Scaler(Scaling(1, 99, QueueLength(2.0, 30.0)))
    ours = scaler.count(0.0, len(counts), [given(count) for count in counts], PlacementView())
    assert ours == max(1, math.ceil(theirs))


def test_requests_count_in_the_mean_of_the_look_back() -> None:
    scaler = Scaler(Scaling(1, 99, QueueLength(2.0, 10.0)))
    assert scaler.count(0.0, 1, [given(40)], PlacementView()) == 20
    assert scaler.count(10.0, 1, [given(0)], PlacementView()) == 10
    assert scaler.count(10.5, 1, [given(0)], PlacementView()) == 1, "the first is too long ago"


def test_nothing_is_lost_and_pinned_adapters_stay_whoever_decides() -> None:
    size = ReplicaSize(lora_pool_rows=96, rank_alignment=16, max_loras=7)
    for objective in (Scaling(1, 6).objective, QueueLength(4.0, 11.0)):
        scaling = Scaling(1, 6, objective, upscale_delay_s=1.0, downscale_delay_s=5.0)
        costs = replace(read_costs(), start_s=2.0)
        plan = replace(PLAN, num_replicas=1, size=size, costs=costs, scaling=scaling, pinned=(0, 1))
        result = simulate(traffic(600, rate=40.0), plan, 0)
        assert result.num_lost == result.num_pinned_loads == 0
        assert max(tick.num_replicas for tick in result.ticks) > 1
        unpinned = simulate(traffic(600, rate=40.0), replace(plan, pinned=()), 0)
        assert unpinned.num_loads > result.num_loads


def test_a_reaction_is_the_next_decision_for_more() -> None:
    result = simulate(traffic(10), Plan(1, read_costs()), 0)
    result.scalings = [(5.0, 1, 2), (12.0, 2, 1), (14.0, 1, 3)]
    assert [result.reaction_s(at_s) for at_s in (0.0, 6.0, 15.0)] == [5.0, 8.0, math.inf]
