"""A replica's load is what it reported and what this ingress has changed since it did."""

from __future__ import annotations

import random

import pytest

from app.deployments.ingress.dispatch.replica_load import MAX_CHANGE_AGE_S, ReplicaLoadTracker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_own_requests_are_counted_once() -> None:
    clock = Clock()
    loads = ReplicaLoadTracker(clock)
    loads.add("r", +3)
    assert (loads.num_requests("r"), loads.num_requests("another"), loads.own) == (3, 0, {"r": 3})
    clock.now_s = 101.0
    loads.add("r", +2)
    clock.now_s = 101.5
    loads.apply_reports({"r": (10, 40.5)}, now_s=41.0)  # said half a second ago, when all five of ours were there
    assert loads.num_requests("r") == 10
    loads.add("r", +1)
    loads.add("r", -4)
    assert loads.num_requests("r") == 7


def test_what_was_sent_after_a_report_comes_on_top_of_it() -> None:
    clock = Clock()
    loads = ReplicaLoadTracker(clock)
    loads.add("r", +2)
    clock.now_s = 100.8
    loads.add("r", +5)
    clock.now_s = 101.0
    loads.apply_reports({"r": (4, 7.5)}, now_s=8.0)  # it is of 100.5
    assert loads.num_requests("r") == 9
    loads.apply_reports({"r": (4, 7.9)}, now_s=8.0)  # of 100.9, and has ours: but it has counted fewer than ours are
    assert loads.num_requests("r") == 7, "never fewer than our own"


@pytest.mark.parametrize("seed", range(20))
def test_placement_may_leave_out_that_an_idle_replica_is_still_idle(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    whole, short = ReplicaLoadTracker(clock), ReplicaLoadTracker(clock)
    reported: list[int] = []
    for _ in range(400):
        clock.now_s += draw.choice([0.1, 1.0, 40.0])
        if draw.random() < 0.5:
            by = draw.choice([+1, +3, -whole.own.get("r", 0)])
            whole.add("r", by)
            short.add("r", by)
        else:
            reported.append(draw.choice([0, 0, 0, 2, 9]))
            row = {"r": (reported[-1], clock.now_s - draw.random() / 10)}
            whole.apply_reports(row, clock.now_s)
            if reported[-2:] != [0, 0]:
                short.apply_reports(row, clock.now_s)
        assert whole.num_requests("r") == short.num_requests("r")


def test_replicas_that_are_gone_and_old_changes_are_forgotten() -> None:
    clock = Clock()
    loads = ReplicaLoadTracker(clock)
    for _ in range(1000):
        clock.now_s += 1.0
        loads.add("r", +1)
        loads.add("r", -1)
    assert len(loads._replicas["r"].changes) <= 2 * MAX_CHANGE_AGE_S + 2
    loads.apply_reports({"r": (5, 0.0), "other": (5, 0.0)}, now_s=0.0)
    loads.apply_reports({"r": None}, now_s=1.0)
    assert loads.num_requests("r") == 0
    loads.retain(["other"])
    assert set(loads._replicas) == {"other"}
