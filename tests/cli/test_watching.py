"""Lines for replicas that are lost and come back."""

from __future__ import annotations

from app.cli.watching import ReplicaWatch


def test_a_loss_and_its_end_are_a_line_each() -> None:
    said: list[str] = []
    now_s = 0.0
    watch = ReplicaWatch(said.append, lambda: now_s)
    for states in ({"STARTING": 2}, {"RUNNING": 1, "STARTING": 1}, {"RUNNING": 2}, {"RUNNING": 2}):
        watch.look({"EngineReplica": states})
    assert said == []
    watch.look({"EngineReplica": {"RUNNING": 1}})
    now_s = 3.2
    watch.look({"EngineReplica": {"RUNNING": 1, "STARTING": 1}})
    watch.look({"EngineReplica": {"RUNNING": 2}})
    assert said == ["1 of 2 EngineReplica lost; Serve starts another", "2 EngineReplica again, after 3 s"]


def test_a_replica_that_is_stopped_on_purpose_is_no_loss() -> None:
    said: list[str] = []
    watch = ReplicaWatch(said.append)
    for states in ({"RUNNING": 2}, {"RUNNING": 1, "STOPPING": 1}, {"RUNNING": 1}):
        watch.look({"EngineReplica": states})
    assert said == []
