"""The benchmark of replicas that come and go: what is asked, by a server of a few lines, and what is counted."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path

import pytest

from app.cli.config_file import read_settings
from load_tests.http.bench_scaling import (
    LOOK_S,
    MAX_REPLICAS,
    POLICIES,
    TRAFFIC,
    Fleet,
    Phase,
    TrafficResult,
    changes,
    counting,
    reaction_s,
    requests,
    row,
    settings,
)
from load_tests.http.client import Outcome

PHASES = (Phase(10, 2, 3), Phase(10, 8, 6), Phase(10, 2, 3))


def test_phases_follow_each_other_with_their_rates_and_adapters() -> None:
    planned = requests(PHASES, seed=2)
    assert planned == requests(PHASES, seed=2)
    assert [each.index for each in planned] == [*range(len(planned))]
    crowd = [each for each in planned if 10 <= each.arrival_s < 20]
    assert 50 < len(crowd) < 110 > len(planned) - 20
    assert {each.model for each in crowd} == {f"a{index}" for index in range(6)}
    assert {each.model for each in planned if each.arrival_s < 10} <= {"a0", "a1", "a2"}
    assert max(each.arrival_s for each in planned) < 30


@pytest.mark.parametrize("name", TRAFFIC)
def test_all_traffic_asks_for_more_adapters_than_three_replicas_hold_and_ends_with_few(name: str) -> None:
    fleet = Fleet()
    most = max(phase.num_adapters for phase in TRAFFIC[name])
    assert 3 * fleet.num_fitting < most <= fleet.num_adapters <= MAX_REPLICAS * fleet.num_fitting
    assert TRAFFIC[name][-1].num_adapters < fleet.num_fitting


def test_the_reaction_is_counted_from_the_rise_to_the_next_replica_more() -> None:
    counts = [(1.0, 1), (9.0, 1), (12.0, 1), (13.5, 2), (18.0, 4), (29.0, 3)]
    assert reaction_s(PHASES, counts) == 3.5
    assert changes(counts) == [1, 2, 4, 3]
    assert math.isinf(reaction_s(PHASES, [(1.0, 4), (29.0, 4)]))


def test_replicas_are_counted_until_the_end() -> None:
    with counting(lambda: 3) as counts:
        deadline_s = time.monotonic() + 120
        while len(counts) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    number = len(counts)
    assert all(later[0] - earlier[0] > 0.9 * LOOK_S for earlier, later in pairwise(counts))
    assert {count for _, count in counts} == {3}
    time.sleep(2 * LOOK_S)
    assert len(counts) == number >= 2


def test_a_line_has_what_was_lost_and_when_tokens_came() -> None:
    outcomes = [Outcome(index, "a0", "bench", 1.0, 1.0, [1.25], 2.0) for index in range(3)]
    outcomes.append(Outcome(3, "a0", "bench", 1.0, 1.0, error="HTTP 503"))
    line = row("mine", PHASES, TrafficResult(outcomes, [(1.0, 1), (15.0, 2)], num_loads=3, num_reloaded=0))
    assert line == "| mine | 5.0 | 1 → 2 | 1.50 | 1 | 750 | 0 | 0.250 | 0.250 |"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_service_is_one_that_starts(tmp_path: Path, policy: str) -> None:
    (tmp_path / "loras").mkdir()
    config = read_settings(settings(tmp_path, Fleet(), POLICIES[policy], 20_001))
    assert config.engine.lora_pool_rows == 64
    assert len(config.adapters.preload) == 26
