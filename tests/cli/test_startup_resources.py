"""What is told when Ray cannot place a replica: who waits, what there is, who has it."""

from __future__ import annotations

import warnings

import pytest

from app.cli.startup import PATIENCE_S, ResourceWatch, no_room
from app.engine.errors import EngineFailure

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    from app.deployments.rpc.ray_private import ActorLocation
    from app.main import ENGINE_CPUS, INGRESS_CPUS, NUM_INGRESSES

NODE, OTHER = "n1", "n2"


def replica(deployment: str, node_id: str | None, **resources: float) -> ActorLocation:
    return ActorLocation(f"SERVE_REPLICA::polylora#{deployment}#x7", resources, node_id)


def told(machines: dict[str, dict[str, float]], *actors: ActorLocation) -> str | None:
    return no_room(machines, actors, ["polylora"])


def test_what_waits_beside_what_there_is_and_who_has_it() -> None:
    engines = [replica("EngineReplica", NODE, CPU=1.0) for _ in range(2)]
    store = ActorLocation("polylora-store", {}, NODE)
    sentence = told({NODE: {"CPU": 2.0, "memory": 1e9}}, *engines, store, replica("Ingress", None, CPU=0.1))
    assert sentence is not None
    assert sentence.startswith(
        "Ray cannot place 1 of Ingress (0.1 CPU each); there is 2 CPU on a machine, used by 2 of EngineReplica "
        "(2 CPU together). Request less (ray_actor_options"
    )


def test_what_no_machine_has() -> None:
    sentence = told({NODE: {"CPU": 2.0}, OTHER: {"CPU": 2.0}}, replica("EngineReplica", None, CPU=64.0, GPU=1.0))
    assert sentence is not None
    assert "1 of EngineReplica (64 CPU and 1 GPU each); there is 2 CPU and 0 GPU on each of 2 machines" in sentence
    assert "used by no actor" in sentence


def test_somebody_elses_actors_hold_what_they_hold_and_wait_for_themselves() -> None:
    trainer = ActorLocation("Trainer", {"CPU": 1.5}, NODE)
    other_app = ActorLocation("SERVE_REPLICA::other#EngineReplica#x", {"CPU": 64.0}, None)
    assert told({NODE: {"CPU": 2.0}}, trainer, other_app) is None
    sentence = told({NODE: {"CPU": 2.0}}, trainer, other_app, replica("EngineReplica", None, CPU=0.9))
    assert sentence is not None
    assert "1 of EngineReplica (0.9 CPU each)" in sentence
    assert "used by 1 of Trainer (1.5 CPU together)" in sentence


def test_what_fits_on_some_machine_is_only_starting() -> None:
    waiting = [replica("EngineReplica", None, CPU=0.9) for _ in range(2)]
    assert told({NODE: {"CPU": 2.0}}, *waiting) is None
    assert told({NODE: {"CPU": 0.5}, OTHER: {"CPU": 1.0}}, waiting[0]) is None
    assert told({NODE: {"CPU": 2.0}}) is None


def test_an_engine_and_two_ingresses_fit_on_every_core() -> None:
    """Ray's sums of tenths are exact; those of floats are not."""
    for num_cores in range(1, 65):
        placed = [replica("EngineReplica", NODE, CPU=ENGINE_CPUS) for _ in range(num_cores)]
        placed += [replica("Ingress", NODE, CPU=INGRESS_CPUS) for _ in range(NUM_INGRESSES * num_cores - 1)]
        machine = {NODE: {"CPU": float(num_cores)}}
        last = replica("Ingress", None, CPU=INGRESS_CPUS)
        assert told(machine, *placed, last) is None
        assert told(machine, *placed, replica("Ingress", NODE, CPU=INGRESS_CPUS), last) is not None


def test_it_is_told_once_and_given_up_in_the_end() -> None:
    said: list[str] = []
    now = 0.0
    watch = ResourceWatch(said.append, 60.0, clock=lambda: now)
    watch.look("no room")
    now = PATIENCE_S - 0.1
    watch.look("no room")
    assert said == []
    now = PATIENCE_S
    watch.look("no room")
    watch.look("no room")
    watch.look("no room for two")
    assert said == ["no room", "no room for two"]
    now = 60.0
    with pytest.raises(EngineFailure, match="does not start: no room for two"):
        watch.look("no room for two")


def test_what_finds_room_is_forgotten() -> None:
    said: list[str] = []
    now = 0.0
    watch = ResourceWatch(said.append, 60.0, clock=lambda: now)
    watch.look("no room")
    now = 59.0
    watch.look(None)
    watch.look("no room")
    now = 62.0
    watch.look("no room")
    assert said == []
