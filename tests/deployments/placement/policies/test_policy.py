"""Which replica one request goes to: its adapter's homes first, the least loaded of them."""

from __future__ import annotations

import random

from app.config import PlacementConfig
from app.deployments.placement.policies.choosing import make_policy
from app.deployments.placement.policies.policy import choose_replica
from app.deployments.placement.rendezvous import rendezvous_order
from app.deployments.placement.table import PlacementTable, ReplicaReport

STICKY = make_policy(PlacementConfig())
LEAST_LOADED = make_policy(PlacementConfig(policy="least_loaded"))


def digests(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{rng.getrandbits(128):032x}" for _ in range(count)]


def test_every_process_chooses_the_same_without_the_actor() -> None:
    table = PlacementTable({f"r{i}": ReplicaReport(f"r{i}") for i in range(5)})
    loads = dict.fromkeys(table.replicas, 0)
    for digest in digests(40):
        chosen = {choose_replica(digest, table, dict(loads), STICKY) for _ in range(3)}
        assert chosen == {rendezvous_order(digest, table.replicas)[0]}


def test_choice_follows_homes_then_load() -> None:
    table = PlacementTable(
        {"a": ReplicaReport("a"), "b": ReplicaReport("b"), "c": ReplicaReport("c")}, {"x": ("b", "c")}
    )
    assert choose_replica("x", table, {"a": 0, "b": 9, "c": 3}, STICKY) == "c"
    assert choose_replica("x", table, {"a": 0, "b": 9}, STICKY) == "b"
    assert choose_replica("x", table, {"a": 0}, STICKY) == "a"
    assert choose_replica(None, table, {"a": 4, "b": 1, "c": 2}, STICKY) == "b"
    assert choose_replica("y", table, {"a": 4, "b": 1, "c": 2}, LEAST_LOADED) == "b"
    assert choose_replica("x", table, {}, STICKY) is None
