"""A replica tells the autoscaler numbers, and always all that it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.deployments.placement.autoscaling import Demand
from app.deployments.replica.autoscaling_metrics import FIRST_ANSWER_TOKENS, AutoscalingMetrics
from app.engine.stats import EngineStats, ResidentAdapter

EMPTY = EngineStats(**{name: 0 for name in EngineStats.__dataclass_fields__ if name != "residents"}, residents=())


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_numbers_are_those_that_the_policy_reads() -> None:
    numbers = AutoscalingMetrics(Clock()).sample(EMPTY, 0, [])
    assert list(numbers) == list(Demand.__dataclass_fields__)
    assert {type(number) for number in numbers.values()} == {float}
    assert not any(numbers.values())


def test_work_is_what_waits_and_half_of_what_runs() -> None:
    stats = replace(EMPTY, num_running=4, num_waiting=2, num_prompt_tokens=4 * 100)
    first = AutoscalingMetrics(Clock()).sample(stats, 1, [])
    assert first["work_tokens"] == 3 * (100 + FIRST_ANSWER_TOKENS) + 4 * FIRST_ANSWER_TOKENS / 2
    later = replace(stats, num_finished=6, num_tokens_generated=60, num_prompt_tokens=1000)
    assert AutoscalingMetrics(Clock()).sample(later, 0, [])["work_tokens"] == 2 * (100 + 10) + 4 * 5


def test_the_rate_is_the_best_that_was_seen_with_enough_to_do() -> None:
    clock, busy = Clock(), replace(EMPTY, num_running=8)
    meter = AutoscalingMetrics(clock)
    assert meter.sample(busy, 0, [])["tokens_per_s"] == 0
    clock.now_s += 1
    assert meter.sample(replace(busy, num_tokens_computed=500), 0, [])["tokens_per_s"] == pytest.approx(500)
    clock.now_s += 1  # it ran dry in between: that says nothing of what it can do
    meter.sample(replace(EMPTY, num_tokens_computed=600), 0, [])
    clock.now_s += 1
    rate = meter.sample(replace(busy, num_tokens_computed=610), 0, [])["tokens_per_s"]
    assert 480 < rate < 500
    clock.now_s += 0.1  # two samples at once measure nothing
    assert meter.sample(replace(busy, num_tokens_computed=2000), 0, [])["tokens_per_s"] == rate


def test_adapters_in_demand_count_with_their_rows_wherever_they_are() -> None:
    meter = AutoscalingMetrics(Clock())
    stats = replace(
        EMPTY,
        num_rank_rows=128,
        residents=(ResidentAdapter("a", 8, 0, 8, 0), ResidentAdapter("b", 64, 64, 64, 0)),
    )
    assert meter.sample(stats, 0, ["a", "b"])["adapter_rows"] == 72
    evicted = replace(stats, residents=(ResidentAdapter("c", 16, 0, 16, 1),))
    assert meter.sample(evicted, 0, ["a", "b", "c"])["adapter_rows"] == 88
    assert meter.sample(evicted, 0, ["c", "never seen"])["adapter_rows"] == 32  # as large as the usual one
    assert meter.sample(evicted, 0, [])["adapter_rows"] == 0


def test_kv_is_what_running_sequences_hold() -> None:
    assert (
        AutoscalingMetrics(Clock()).sample(replace(EMPTY, num_blocks=64, num_blocks_free=16), 0, [])["kv_used"] == 0.75
    )
