"""Placement: sticky, bounded, stable when the fleet changes, and the same wherever it is computed."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import PlacementConfig
from app.deployments.placement import books as placement
from app.deployments.placement.books import DWELL_S, PlacementBooks
from app.deployments.placement.policies.choosing import make_policy
from app.deployments.placement.table import PlacementTable, ReplicaReport
from tests.budgets import examples

STICKY = make_policy(PlacementConfig())
LEAST_LOADED = make_policy(PlacementConfig(policy="least_loaded"))


def books(num_replicas: int) -> PlacementBooks:
    result = PlacementBooks(STICKY, silence_s=10)
    for index in range(num_replicas):
        result.report(ReplicaReport(f"r{index}"), 0.0)
    return result


def digests(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{rng.getrandbits(128):032x}" for _ in range(count)]


def test_no_replica_is_given_more_than_its_bound() -> None:
    fleet = books(7)
    fleet.assign(digests(500))
    counts = Counter(home for homes in fleet.table.homes.values() for home in homes)
    assert set(counts) == {f"r{i}" for i in range(7)}
    assert max(counts.values()) <= math.ceil(1.25 * 501 / 7)


def test_assigning_again_and_adding_a_replica_move_nothing() -> None:
    fleet = books(3)
    fleet.assign(digests(100))
    before = dict(fleet.table.homes)
    fleet.report(ReplicaReport("new"), 1.0)
    assert not fleet.assign(digests(100))
    assert fleet.table.homes == before


def test_losing_a_replica_moves_its_adapters_only() -> None:
    fleet = books(4)
    fleet.assign(digests(200))
    before = dict(fleet.table.homes)
    assert fleet.gone("r2", 1.0)
    fleet.assign(digests(200))
    after = fleet.table.homes
    moved = {digest for digest in before if before[digest] != after[digest]}
    assert moved == {digest for digest, homes in before.items() if homes == ("r2",)}
    assert not any("r2" in homes for homes in after.values())


def test_a_replica_declared_gone_does_not_come_back_by_a_late_report() -> None:
    fleet = books(2)
    fleet.gone("r0", 1.0)
    for now_s in (2.0, 9.0, 11.0):
        for replica_id in ("r0", "r1"):
            assert not fleet.report(ReplicaReport(replica_id), now_s)
        assert not fleet.expire(now_s)
        assert set(fleet.table.replicas) == {"r1"}


def test_a_healthy_replica_that_was_not_reached_for_a_moment_comes_back() -> None:
    fleet = books(2)
    fleet.gone("r0", 1.0)
    fleet.gone("r0", 4.0)  # another ingress says so, too
    back_s = [float(now_s) for now_s in range(5, 40) if fleet.report(ReplicaReport("r0"), float(now_s))]
    assert back_s == [15.0], "the time of silence after it was last declared gone"
    assert set(fleet.table.replicas) == {"r0", "r1"}
    fleet.gone("r0", 40.0)  # it drained: whoever is sent there says so again
    assert not fleet.report(ReplicaReport("r0"), 41.0)


def test_replicas_and_adapters_that_came_and_went_leave_nothing_in_the_books() -> None:
    fleet = books(2)
    names = digests(50)
    for number, digest in enumerate(names):
        now_s = 20.0 * number
        for replica_id in ("r0", "r1", f"new{number}"):
            fleet.report(ReplicaReport(replica_id), now_s)
        fleet.assign([digest])
        (home,) = fleet.table.homes[digest]
        fleet.report(ReplicaReport(home, num_running=60, active={digest: 60}), now_s)
        assert fleet.rebalance(now_s)
        fleet.gone(f"new{number}", now_s)
        fleet.gone(f"never seen {number}", now_s)
        fleet.expire(now_s)
    assert set(fleet._changed_s) == {names[-1]}, "it dwells"
    assert set(fleet._gone) == {"new49", "never seen 49"}
    assert set(fleet._seen_s) == {"r0", "r1"}


def test_silence_takes_a_replica_off_the_table() -> None:
    fleet = books(2)
    fleet.report(ReplicaReport("r1"), 8.0)
    assert fleet.expire(11.0)
    assert set(fleet.table.replicas) == {"r1"}
    assert not fleet.expire(11.0)


def test_after_a_restart_adapters_are_found_where_their_rows_are() -> None:
    names = digests(60)
    old = books(4)
    old.assign(names)
    homes = {digest: homes[0] for digest, homes in old.table.homes.items()}
    new = PlacementBooks(STICKY, silence_s=10)
    for index in range(4):
        resident = tuple(digest for digest, home in homes.items() if home == f"r{index}")
        new.report(ReplicaReport(f"r{index}", resident=resident), 0.0)
    rng = random.Random(3)
    rng.shuffle(names)
    new.assign(names)
    assert new.table.homes == {digest: (home,) for digest, home in homes.items()}


def test_a_hot_adapter_is_shared_once_and_taken_back_when_it_cools() -> None:
    fleet = books(3)
    hot, cold = digests(2)
    fleet.assign([hot, cold])
    (home,) = fleet.table.homes[hot]
    for replica_id in fleet.table.replicas:
        load = 60 if replica_id == home else 1
        fleet.report(ReplicaReport(replica_id, num_running=load, active={hot: load} if load > 1 else {}), 1.0)
    assert fleet.rebalance(1.0)
    homes = fleet.table.homes[hot]
    assert len(homes) == 2
    assert homes[0] == home
    assert len(fleet.table.homes[cold]) == 1
    assert not fleet.rebalance(2.0), "it dwells"
    for replica_id in fleet.table.replicas:
        fleet.report(ReplicaReport(replica_id), 3.0)
    assert not fleet.rebalance(3.0)
    assert fleet.rebalance(2.0 + DWELL_S)
    assert fleet.table.homes[hot] == (home,)


def test_more_adapters_than_are_remembered_do_not_take_the_homes_of_those_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "MAX_HOMES", 8)
    fleet = books(3)
    hot, *others = digests(30)
    fleet.assign([hot])
    (home,) = fleet.table.homes[hot]
    fleet.report(ReplicaReport(home, num_running=60, active={hot: 60}), 1.0)
    assert fleet.rebalance(1.0)
    homes = fleet.table.homes[hot]
    assert len(homes) == 2
    for digest in others:
        fleet.assign([digest])
        fleet.report(ReplicaReport(home, num_running=60, active={hot: 60}), 1.0)
    assert fleet.table.homes[hot] == homes
    assert len(fleet.table.homes) == 8


def test_an_even_load_is_left_alone() -> None:
    fleet = books(3)
    fleet.assign(digests(9))
    for replica_id in list(fleet.table.replicas):
        mine = [digest for digest, homes in fleet.table.homes.items() if replica_id in homes]
        fleet.report(ReplicaReport(replica_id, num_running=20, active=dict.fromkeys(mine, 5)), 1.0)
    assert not fleet.rebalance(1.0)


@given(
    num_replicas=st.integers(1, 6),
    events=st.lists(
        st.tuples(st.sampled_from(["assign", "gone", "add", "rebalance", "report"]), st.integers(0, 30)), max_size=60
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_homes_are_always_living_replicas(num_replicas: int, events: list[tuple[str, int]]) -> None:
    fleet = books(num_replicas)
    names = digests(31)
    for now, (event, number) in enumerate(events):
        match event:
            case "assign":
                fleet.assign([names[number]])
            case "gone":
                fleet.gone(f"r{number % 8}", float(now))
            case "add":
                fleet.report(ReplicaReport(f"n{number}"), float(now))
            case "report":
                active = {names[number]: number}
                for replica_id in list(fleet.table.replicas)[:1]:
                    fleet.report(ReplicaReport(replica_id, num_running=number, active=active), float(now))
            case "rebalance":
                fleet.rebalance(float(now * 5))
        table = fleet.table
        for homes in table.homes.values():
            assert homes
            assert len(set(homes)) == len(homes)
            assert set(homes) <= set(table.replicas)


def test_expected_traffic_has_its_part_of_the_replicas_and_gives_it_back() -> None:
    fleet = books(4)
    heavy, light = digests(2)
    fleet.assign([light])
    assert not fleet.steer({heavy: 0.6}), "it has no home yet"
    assert fleet.assign([heavy])
    homes = fleet.table.homes[heavy]
    assert len(homes) == 2
    assert len(fleet.table.homes[light]) == 1
    assert not fleet.rebalance(100.0), "no load is no reason to take them back"
    assert fleet.steer({heavy: 0.9, light: 0.3})
    assert len(fleet.table.homes[heavy]) == 4
    assert fleet.table.homes[heavy][:2] == homes, "homes are added, not moved"
    assert len(fleet.table.homes[light]) == 1
    for index in range(4, 8):
        fleet.report(ReplicaReport(f"r{index}"), 100.0)
    assert fleet.rebalance(100.0)
    assert len(fleet.table.homes[heavy]) == 7
    assert not fleet.steer({})
    for step in range(6):
        assert fleet.rebalance(100.0 + (step + 1) * DWELL_S)
    assert len(fleet.table.homes[heavy]) == len(fleet.table.homes[light]) == 1


def test_an_adapter_is_resident_where_a_report_says_so() -> None:
    reports = {name: ReplicaReport(name, resident=resident) for name, resident in {"r0": (), "r1": ("a", "b")}.items()}
    table = PlacementTable(reports, {"c": ("r0",)})
    assert [table.is_resident(digest) for digest in "abc"] == [True, True, False]
