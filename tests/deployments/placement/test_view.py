"""What a process knows of placement is asked at every request: an answer costs the same however large the fleet is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from app.deployments.placement.messages import Key, Row
from app.deployments.placement.view import PlacementView, UsableFleet

#: Questions about an adapter, as every request for it asks them.
QUESTIONS: dict[str, Callable[[UsableFleet, PlacementView, str], object]] = {
    "is_resident": lambda _, view, digest: view.is_resident(digest),
    "homes": lambda _, view, digest: view.assigned_replicas(digest),
    "holders": lambda _, view, digest: view.resident_replicas(digest),
    "usable holders": lambda fleet, _, digest: fleet.resident_replicas(digest),
    "num_rows": lambda _, view, digest: view.num_rows(digest),
    "num_assigned_to": lambda fleet, *_: fleet.num_assigned_to("r0"),
}


class Counted(str):
    """A name that counts how often it, or another of its fleet, is hashed or compared: what a look-up costs."""

    looks: list[int]

    def __hash__(self) -> int:
        self.looks[0] += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        self.looks[0] += 1
        return super().__eq__(other)


class Known(NamedTuple):
    """A fleet as one process knows it, and what its names have counted so far."""

    fleet: UsableFleet
    view: PlacementView
    name: Callable[[str], Counted]
    looks: list[int]


def known(num_replicas: int, num_residents: int) -> Known:
    """Each replica holds so many adapters, whose home it is: `d0` is one of them."""
    looks = [0]

    def name(text: str) -> Counted:
        made = Counted(text)
        made.looks = looks
        return made

    rows: dict[Key, Row] = {}
    for index in range(num_replicas):
        replica_id = name(f"r{index}")
        rows["replica", replica_id] = ("0.0", "64", "4096")
        for digest in (name(f"d{index + num_replicas * each}") for each in range(num_residents)):
            rows["home", digest] = (replica_id,)
            rows["resident", digest, replica_id] = ("8",)
    view = PlacementView()
    view.apply(rows)
    return Known(UsableFleet(view, dict.fromkeys(view.replicas), lambda _: 0), view, name, looks)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("digest", ["d0", "cold"])
def test_an_answer_costs_the_same_in_a_fleet_of_any_size(question: str, digest: str) -> None:
    costs = []
    for num_replicas, num_residents in ((3, 3), (60, 40)):
        fleet, view, name, looks = known(num_replicas, num_residents)
        asked = name(digest)
        looks[0] = 0
        QUESTIONS[question](fleet, view, asked)
        costs.append(looks[0])
    assert costs[0] == costs[1] < 20


def test_all_holders_are_told_in_the_order_in_which_the_adapter_prefers_them() -> None:
    view = known(40, 1).view
    holders = [*view.preference_order("many")][5:35:7]
    view.apply({("resident", "many", replica_id): () for replica_id in holders})
    assert view.resident_replicas("many") == holders
    view.apply({("replica", holders[0]): None})
    assert view.resident_replicas("many") == holders[1:]
