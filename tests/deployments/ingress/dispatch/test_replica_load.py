"""A replica's load is what it reported and what this ingress has changed since it did."""

from __future__ import annotations

from app.deployments.ingress.dispatch.replica_load import MEMORY_S, ReplicaLoadTracker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_own_requests_are_counted_once() -> None:
    clock = Clock()
    loads = ReplicaLoadTracker(clock)
    loads.change("r", +3)
    assert (loads.of("r"), loads.of("another"), loads.own) == (3, 0, {"r": 3})
    clock.now_s = 101.0
    loads.change("r", +2)
    clock.now_s = 101.5
    loads.take({"r": (10, 40.5)}, now_s=41.0)  # said half a second ago, when all five of ours were there
    assert loads.of("r") == 10
    loads.change("r", +1)
    loads.change("r", -4)
    assert loads.of("r") == 7


def test_what_was_sent_after_a_report_comes_on_top_of_it() -> None:
    clock = Clock()
    loads = ReplicaLoadTracker(clock)
    loads.change("r", +2)
    clock.now_s = 100.8
    loads.change("r", +5)
    clock.now_s = 101.0
    loads.take({"r": (4, 7.5)}, now_s=8.0)  # it is of 100.5
    assert loads.of("r") == 9
    loads.take({"r": (4, 7.9)}, now_s=8.0)  # of 100.9, and has ours: but it has counted fewer than ours are
    assert loads.of("r") == 7, "never fewer than our own"


def test_replicas_that_are_gone_and_old_changes_are_forgotten() -> None:
    clock = Clock()
    loads = ReplicaLoadTracker(clock)
    for _ in range(1000):
        clock.now_s += 1.0
        loads.change("r", +1)
        loads.change("r", -1)
    assert len(loads._replicas["r"].changes) <= 2 * MEMORY_S + 2
    loads.take({"r": (5, 0.0), "other": (5, 0.0)}, now_s=0.0)
    loads.take({"r": None}, now_s=1.0)
    assert loads.of("r") == 0
    loads.keep(["other"])
    assert set(loads._replicas) == {"other"}
