"""Lines for replicas that are lost and come back."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest

from app.cli.startup import ReplicaWatch, deployments_of


def test_a_loss_and_its_end_are_a_line_each() -> None:
    said: list[str] = []
    now_s = 0.0
    watch = ReplicaWatch(said.append, lambda: now_s)
    for number in (0, 1, 2, 2):
        watch.look({"EngineReplica": ("UPDATING", number)})
    assert said == []
    watch.look({"EngineReplica": ("UNHEALTHY", 1)})
    now_s = 3.2
    watch.look({"EngineReplica": ("HEALTHY", 1)})
    watch.look({"EngineReplica": ("HEALTHY", 2)})
    assert said == ["1 of 2 EngineReplica lost; Serve starts another", "2 EngineReplica running again after 3 s"]


def test_a_replica_that_is_stopped_on_purpose_is_no_loss() -> None:
    said: list[str] = []
    watch = ReplicaWatch(said.append)
    for doing, number in (("HEALTHY", 2), ("DOWNSCALING", 1), ("HEALTHY", 1), ("UPDATING", 0), ("UPDATING", 1)):
        watch.look({"EngineReplica": (doing, number)})
    assert said == []


class State(Enum):
    RUNNING = "RUNNING"
    STARTING = "STARTING"


@pytest.mark.parametrize("running", [State.RUNNING, "RUNNING"])
def test_states_are_read_as_members_and_as_the_names_that_ray_brings(running: State | str) -> None:
    states = {running: 2, State.STARTING: 1}
    deployment = SimpleNamespace(status=SimpleNamespace(value="UNHEALTHY"), replica_states=states)
    application = SimpleNamespace(deployments={"EngineReplica": deployment})
    assert deployments_of([application]) == {"EngineReplica": ("UNHEALTHY", 2)}
