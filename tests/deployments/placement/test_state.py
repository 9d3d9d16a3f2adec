"""Placement: sticky, bounded, stable when the fleet changes, and no process's view decides for others."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.placement import state as placement
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import DrainingReplica, Key, ReplicaReport, Residency, Row
from app.deployments.placement.state import DWELL_S, TRAFFIC_S
from app.deployments.placement.view import PlacementView
from tests.budgets import examples
from tests.deployments.placed import ORIGIN
from tests.deployments.placement.reporting_fleet import STICKY, ReportingFleet, digests


def test_no_replica_is_given_more_than_its_bound() -> None:
    fleet = ReportingFleet(7)
    fleet.assign(digests(500))
    counts = Counter(home for homes in fleet.homes.values() for home in homes)
    assert set(counts) == {f"r{i}" for i in range(7)}
    assert max(counts.values()) <= math.ceil(1.25 * 501 / 7)


def test_the_answer_is_the_homes_that_were_asked_for() -> None:
    fleet = ReportingFleet(3)
    first, second = digests(2)
    assert fleet.assign([first]) == {first: fleet.homes[first]}
    assert set(fleet.assign([first, second])) == {first, second}
    assert ReportingFleet(0).assign([first]) == {}, "there is nothing to answer"


def test_assigning_again_and_adding_a_replica_move_nothing() -> None:
    fleet = ReportingFleet(3)
    fleet.assign(digests(100))
    before = fleet.homes
    fleet.hear(ReplicaReport("new"), 1.0)
    fleet.take_changes()
    fleet.assign(digests(100))
    assert fleet.homes == before
    assert fleet.take_changes() == {}


def test_losing_a_replica_moves_its_adapters_only() -> None:
    fleet = ReportingFleet(4)
    fleet.assign(digests(200))
    before = fleet.homes
    fleet.leave("r2", 1.0)
    fleet.assign(digests(200))
    after = fleet.homes
    moved = {digest for digest in before if before[digest] != after[digest]}
    assert moved == {digest for digest, homes in before.items() if homes == ("r2",)}
    assert not any("r2" in homes for homes in after.values())


def test_a_draining_replica_is_shown_with_its_requests_until_it_is_silent() -> None:
    fleet = ReportingFleet(2)
    fleet.assign(digests(4))
    started_s = fleet.view.started_s("r0")
    for now_s, load in ((1.0, 2), (2.0, 1), (3.0, 1)):
        fleet.take_changes()
        fleet.hear(ReplicaReport("r0", load), now_s, is_draining=True)
        assert fleet.view.draining == {"r0": DrainingReplica(started_s, load)}
        assert (("draining", "r0") in fleet.take_changes()) == (now_s < 3.0), "what has not changed is not published"
    assert fleet.replicas == ["r1"]
    assert {home for homes in fleet.homes.values() for home in homes} <= {"r1"}
    fleet.hear(ReplicaReport("r1"), 12.0)
    fleet.expire(13.0, 1)
    assert "r0" in fleet.view.draining
    fleet.expire(13.1, 1)
    assert not fleet.view.draining
    assert fleet.take_changes()["draining", "r0"] is None
    fleet.hear(ReplicaReport("r9", 5), 14.0, is_draining=True)  # placement has restarted since
    assert fleet.view.draining["r9"] == DrainingReplica(0.0, 5)


def reports(fleet: ReportingFleet, now_s: float, *silent: str) -> None:
    """All replicas but the silent ones report; then the books look at who is there, with eight ingresses."""
    for replica_id in fleet.reporters:
        if replica_id not in silent:
            fleet.hear(ReplicaReport(replica_id), now_s)
    fleet.expire(now_s, 8)


def test_one_ingress_that_reaches_nobody_takes_no_replica_off_the_table() -> None:
    fleet = ReportingFleet(32)
    fleet.assign(digests(64))
    homes = fleet.homes
    for second in range(60):
        fleet.report_unreachable("sick", fleet.replicas, float(second))
        reports(fleet, float(second))
        assert len(fleet.replicas) == 32
    assert fleet.homes == homes


def test_one_ingress_is_believed_when_reports_fail_to_come() -> None:
    fleet = ReportingFleet(2)
    reports(fleet, 1.0)
    fleet.report_unreachable("ingress", ["r0"], 2.0)
    reports(fleet, 2.0, "r0")
    reports(fleet, 3.0, "r0")
    assert fleet.replicas == ["r0", "r1"]
    reports(fleet, 4.0, "r0")
    assert fleet.replicas == ["r1"], "sooner than by silence alone"
    assert fleet.hear(ReplicaReport("r0"), 4.5), "it was only slow; what it said before is forgotten"
    assert fleet.replicas == ["r0", "r1"]


def test_a_replica_that_most_ingresses_cannot_reach_is_left_out_for_the_time_of_silence() -> None:
    fleet = ReportingFleet(2)
    for index in range(4):
        fleet.report_unreachable(f"ingress{index}", ["r0"], 1.0)
    reports(fleet, 1.0)
    assert fleet.replicas == ["r0", "r1"], "four of eight are not most"
    fleet.report_unreachable("ingress4", ["r0"], 1.0)
    reports(fleet, 1.5)
    assert fleet.replicas == ["r1"]
    back_s = [now_s for now_s in range(2, 30) if reports(fleet, float(now_s)) or "r0" in fleet.replicas]
    assert back_s[0] == 12
    alone = ReportingFleet(1)
    alone.report_unreachable("the only ingress", ["r0"], 1.0)
    alone.expire(1.0, 1)
    assert alone.replicas == ["r0"], "one is never enough"


def test_a_word_is_withdrawn_and_grows_old() -> None:
    fleet = ReportingFleet(1)
    fleet.report_unreachable("ingress", ["r0", "unknown"], 0.0)
    fleet.report_unreachable("ingress", [], 1.0)
    fleet.expire(4.0, 1)
    assert fleet.replicas == ["r0"], "it was withdrawn"
    fleet.report_unreachable("ingress", ["r0"], 0.0)
    fleet.expire(9.0, 1)
    assert fleet.replicas == ["r0"], "nobody has repeated it"
    assert fleet._reachability._votes == {}


def test_silence_takes_a_replica_off_the_table() -> None:
    fleet = ReportingFleet(2)
    fleet.hear(ReplicaReport("r1"), 8.0)
    fleet.expire(11.0, 1)
    assert fleet.replicas == ["r1"]


def test_a_replica_that_leaves_stays_away_while_it_says_so() -> None:
    fleet = ReportingFleet(2)
    for second in range(30):
        fleet.leave("r0", float(second))
        fleet.hear(ReplicaReport("r1"), float(second))
        fleet.expire(float(second), 1)
        assert fleet.replicas == ["r1"]


def test_replicas_and_adapters_that_came_and_went_leave_nothing_in_the_books() -> None:
    fleet = ReportingFleet(2)
    names = digests(50)
    for number, digest in enumerate(names):
        now_s = 20.0 * number
        for replica_id in ("r0", "r1", f"new{number}"):
            fleet.hear(ReplicaReport(replica_id, resident=(digest,)), now_s)
        fleet.assign([digest])
        (home,) = fleet.homes[digest]
        fleet.hear(ReplicaReport(home, 60, resident=(digest,), active={digest: 60}), now_s)
        fleet.rebalance(now_s)
        assert len(fleet.homes[digest]) == 2
        fleet.report_unreachable("ingress", [f"new{number}", f"never seen {number}"], now_s)
        fleet.leave(f"new{number}", now_s)
        fleet.expire(now_s, 1)
    assert set(fleet._last_change_s) == {names[-1]}, "it dwells"
    assert set(fleet._replicas) == {"r0", "r1"}
    assert fleet._reachability._votes == {}
    for digest in names:
        fleet._set_assigned(digest, ())
    for replica_id in ("r0", "r1"):
        fleet.leave(replica_id)
    view = fleet.view
    assert (view._assigned, view._resident, view._assigned_adapters, view._replicas) == ({}, {}, {}, {})
    assert (view.num_assignments, fleet._replicated, fleet._used) == (0, set(), {})


def test_after_a_restart_adapters_are_found_where_their_rows_are() -> None:
    names = digests(60)
    old = ReportingFleet(4)
    old.assign(names)
    homes = {digest: homes[0] for digest, homes in old.homes.items()}
    new = ReportingFleet()
    for index in range(4):
        resident = tuple(digest for digest, home in homes.items() if home == f"r{index}")
        new.hear(ReplicaReport(f"r{index}", resident=resident), 0.0)
    rng = random.Random(3)
    rng.shuffle(names)
    new.assign(names)
    assert new.homes == {digest: (home,) for digest, home in homes.items()}


def test_a_hot_adapter_is_shared_once_and_taken_back_when_it_cools() -> None:
    fleet = ReportingFleet(3)
    hot, cold = digests(2)
    fleet.assign([hot, cold])
    (home,) = fleet.homes[hot]
    for replica_id in fleet.replicas:
        load = 60 if replica_id == home else 1
        fleet.hear(ReplicaReport(replica_id, num_running=load, active={hot: load} if load > 1 else {}), 1.0)
    fleet.rebalance(1.0)
    homes = fleet.homes[hot]
    assert len(homes) == 2
    assert homes[0] == home
    assert len(fleet.homes[cold]) == 1
    fleet.rebalance(2.0)
    assert fleet.homes[hot] == homes, "it dwells"
    for replica_id in fleet.replicas:
        fleet.hear(ReplicaReport(replica_id), 3.0)
    fleet.rebalance(3.0)
    assert fleet.homes[hot] == homes
    fleet.rebalance(2.0 + DWELL_S)
    assert fleet.homes[hot] == homes, "what was lately may come again"
    fleet.rebalance(3.0 + 4 * TRAFFIC_S)
    assert fleet.homes[hot] == (home,)


def test_load_that_comes_and_goes_keeps_its_homes() -> None:
    fleet = ReportingFleet(3)
    (hot,) = fleet.assign(digests(1))
    changes = 0
    for second in range(120):
        count = 30 if second % 20 < 3 else 0
        before = fleet.homes[hot]
        for each in before:
            share = count // len(before)
            fleet.hear(ReplicaReport(each, num_running=share, active={hot: share} if share else {}), float(second))
        fleet.rebalance(float(second))
        changes += fleet.homes[hot] != before
    assert changes == 1, "one is added and none taken back"


def test_a_copy_goes_where_its_rows_have_room() -> None:
    fleet = ReportingFleet(0)
    rows = {f"r{index}": 32 if index else 64 for index in range(4)}
    for replica_id, count in rows.items():
        fleet.hear(ReplicaReport(replica_id, num_rank_rows=count), 0.0)
    hot, *others = digests(5)
    held = {"r0": (hot,), "r1": tuple(sorted(others[:2])), "r2": tuple(sorted(others[2:])), "r3": ()}
    for replica_id, resident in held.items():
        count = 20 if replica_id == "r0" else 1 if replica_id == "r3" else 0
        active = {hot: 20} if replica_id == "r0" else {}
        said = ReplicaReport(replica_id, count, 0, resident, active, num_rows=dict.fromkeys(resident, 16))
        fleet.hear(replace(said, num_rank_rows=rows[replica_id]), 1.0)
    fleet.assign([hot, *others])
    fleet.rebalance(1.0)
    assert "r3" in fleet.homes[hot], "r1 and r2 have less to do, but no rows"


def test_a_copy_drives_others_out_only_if_too_much_is_carried_for_a_while() -> None:
    """What one report says may be over with the next."""
    fleet = ReportingFleet(0)
    hot, *others = digests(3)

    def say(now_s: float, load: int) -> None:
        for replica_id, resident in {"r0": (hot,), "r1": tuple(sorted(others))}.items():
            active = {hot: load} if replica_id == "r0" else {}
            said = ReplicaReport(replica_id, active.get(hot, 0), 0, resident, active)
            fleet.hear(replace(said, num_rows=dict.fromkeys(resident, 16), num_rank_rows=32), now_s)
        fleet.rebalance(now_s)

    say(0.0, 0)
    fleet.assign([hot, *others])
    for now_s, load in enumerate((20, 0, 20, 20), 1):
        say(float(now_s), load)
        assert fleet.homes[hot] == ("r0",)
    say(5.0, 20)
    assert set(fleet.homes[hot]) == {"r0", "r1"}


def test_an_adapter_that_outgrows_its_homes_gets_more_at_once() -> None:
    """The first report told of a part of the crowd only: the rest does not wait for the homes to have dwelt."""
    fleet = ReportingFleet(40)
    hot = digests(1)[0]
    (home,) = fleet.assign([hot])[hot]
    fleet.hear(ReplicaReport(home, num_running=10, active={hot: 10}), 1.0)
    fleet.rebalance(1.0)
    assert len(fleet.homes[hot]) == 3
    fleet.hear(ReplicaReport(home, num_running=20, active={hot: 20}), 2.0)
    fleet.rebalance(2.0)
    assert len(fleet.homes[hot]) == 3, "a little more waits"
    fleet.hear(ReplicaReport(home, num_running=120, active={hot: 120}), 3.0)
    fleet.rebalance(3.0)
    assert len(fleet.homes[hot]) >= 12


def test_more_adapters_than_are_remembered_do_not_take_the_homes_of_those_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "MAX_ASSIGNED", 8)
    fleet = ReportingFleet(3)
    hot, *others = digests(30)
    fleet.assign([hot])
    (home,) = fleet.homes[hot]
    busy = ReplicaReport(home, num_running=60, active={hot: 60})
    fleet.hear(busy, 1.0)
    fleet.rebalance(1.0)
    homes = fleet.homes[hot]
    assert len(homes) == 2
    for digest in others:
        fleet.assign([digest])
        fleet.hear(busy, 1.0)
    assert fleet.homes[hot] == homes
    assert len(fleet.homes) == 8


def test_an_even_load_is_left_alone() -> None:
    fleet = ReportingFleet(3)
    fleet.assign(digests(9))
    before = fleet.homes
    for replica_id in fleet.replicas:
        mine = fleet.view.assigned_adapters(replica_id)
        fleet.hear(ReplicaReport(replica_id, num_running=20, active=dict.fromkeys(mine, 5)), 1.0)
    fleet.rebalance(1.0)
    assert fleet.homes == before


@given(
    num_replicas=st.integers(1, 6),
    events=st.lists(
        st.tuples(
            st.sampled_from(["assign", "leave", "report_unreachable", "add", "rebalance", "report", "repeat", "steer"]),
            st.integers(0, 30),
        ),
        max_size=60,
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_homes_are_living_replicas_and_copies_by_changes_are_equal(
    num_replicas: int, events: list[tuple[str, int]]
) -> None:
    fleet, copy, rows = ReportingFleet(num_replicas), PlacementView(), dict[Key, Row]()
    names = digests(31)
    for now, (event, number) in enumerate([("begin", 0), *events]):
        now_s = float(now)
        match event:
            case "assign":
                fleet.assign([names[number]])
            case "leave":
                fleet.leave(f"r{number % 8}", now_s)
            case "report_unreachable":
                for ingress_id in ("a", "b"):
                    fleet.report_unreachable(ingress_id, [f"r{number % 8}", f"n{number}"], now_s)
                fleet.expire(now_s, 3)
            case "add":
                fleet.hear(ReplicaReport(f"n{number}"), now_s)
            case "report":
                active, resident = {names[number]: number}, tuple(sorted(names[number % 20 : number % 20 + 4]))
                for replica_id in fleet.replicas[:1]:
                    fleet.hear(ReplicaReport(replica_id, number, resident=resident, active=active), now_s)
            case "repeat":
                for reporter in fleet.reporters.values():
                    reporter.reset()
            case "steer":
                fleet.set_traffic_shares({names[number]: number / 31 or None})
            case "rebalance":
                fleet.rebalance(now_s * 5)
        changes = fleet.take_changes()
        copy.apply(changes)
        for key, row in changes.items():
            rows.pop(key, None)
            if row is not None:
                rows[key] = row
    assert set(copy._keys()) == set(fleet.view._keys()) == set(rows)
    for digest in names:
        assert (
            copy.assigned_replicas(digest) == fleet.view.assigned_replicas(digest) == rows.get(("assigned", digest), ())
        )
        assert copy.resident_replicas(digest) == fleet.view.resident_replicas(digest)
        homes = copy.assigned_replicas(digest)
        assert len(set(homes)) == len(homes)
        assert set(homes) <= set(fleet.replicas)
    assert copy.num_assignments == sum(len(homes) for homes in fleet.homes.values())


def test_expected_traffic_has_its_part_of_the_replicas_and_gives_it_back() -> None:
    fleet = ReportingFleet(4)
    heavy, light = digests(2)
    fleet.assign([light])
    fleet.set_traffic_shares({heavy: 0.6})
    assert heavy not in fleet.homes, "it has no home yet"
    fleet.assign([heavy])
    homes = fleet.homes[heavy]
    assert len(homes) == 2
    assert len(fleet.homes[light]) == 1
    fleet.rebalance(100.0)
    assert fleet.homes[heavy] == homes, "no load is no reason to take them back"
    fleet.set_traffic_shares({heavy: 0.9, light: 0.3})
    assert len(fleet.homes[heavy]) == 4
    assert fleet.homes[heavy][:2] == homes, "homes are added, not moved"
    assert len(fleet.homes[light]) == 1
    for index in range(4, 8):
        fleet.hear(ReplicaReport(f"r{index}"), 100.0)
    fleet.rebalance(100.0)
    assert len(fleet.homes[heavy]) == 7
    fleet.set_traffic_shares({heavy: None, light: None})
    for step in range(6):
        fleet.rebalance(100.0 + (step + 1) * DWELL_S)
    assert len(fleet.homes[heavy]) == len(fleet.homes[light]) == 1


def test_it_is_told_where_an_adapter_is_and_how_it_is_used() -> None:
    fleet = ReportingFleet(2)
    fleet.hear(ReplicaReport("r1", 1, resident=("a", "b"), active={"a": 1}, last_used_s={"a": 5.0}), 1.0)
    assert fleet.residency("a") == [Residency("r1", 1, 5.0)]
    assert fleet.residency("b") == [Residency("r1", 0, None)]
    assert [fleet.view.is_resident(digest) for digest in "abc"] == [True, True, False]
    fleet.hear(ReplicaReport("r1", resident=("b",), last_used_s={"b": 6.0}), 2.0)
    assert fleet.residency("a") == []
    assert fleet.residency("b") == [Residency("r1", 0, 6.0)]


def test_a_message_that_was_lost_is_made_good_by_a_whole_one() -> None:
    fleet = ReportingFleet(1)
    reporter = fleet.reporters["r0"]
    reporter.next_delta(ReplicaReport("r0", resident=("a",)))  # lost
    assert fleet.hear(ReplicaReport("r0", resident=("a", "b")), 1.0), "placement asks for the whole"
    assert [fleet.view.resident_replicas(digest) for digest in "ab"] == [["r0"], ["r0"]]
    late = reporter.next_delta(ReplicaReport("r0", resident=("a",)))
    fleet.hear(ReplicaReport("r0", resident=()), 2.0)
    assert fleet.report(late, 3.0), "it was overtaken"
    assert [fleet.view.resident_replicas(digest) for digest in "ab"] == [[], []]


def test_settings_change_without_a_home_moving() -> None:
    fleet = ReportingFleet(3)
    fleet.assign(digests(30))
    before = fleet.homes
    fleet.configure(STICKY, heartbeat_timeout_s=3, report_interval_s=1)
    fleet.hear(ReplicaReport("r0"), 4.0)
    fleet.expire(5.0, 1)
    assert fleet.replicas == ["r0"]
    assert set(fleet.homes.items()) <= set(before.items())


def two_homes(num_replicas: int) -> ReportingFleet:
    fleet = ReportingFleet(num_replicas)
    fleet.configure(STICKY, 10, 1, min_replicas_per_adapter=2)
    return fleet


def test_with_two_homes_each_a_lost_replica_takes_no_adapters_last_place() -> None:
    fleet = two_homes(4)
    before = fleet.assign(digests(60))
    assert all(len(homes) == 2 for homes in before.values())
    fleet.leave("r1", 1.0)
    after = fleet.homes
    assert all(len(homes) == 2 and "r1" not in homes for homes in after.values()), "they are made good at once"
    assert all(set(before[digest]) & set(after[digest]) for digest in before)


def test_two_homes_come_with_the_second_replica() -> None:
    fleet = two_homes(1)
    (digest,) = digests(1)
    assert fleet.assign([digest]) == {digest: ("r0",)}
    fleet.hear(ReplicaReport("r1"), 1.0)
    assert fleet.homes == {digest: ("r0", "r1")}
    fleet.configure(STICKY, 10, 1, min_replicas_per_adapter=1)
    assert fleet.homes == {digest: ("r0", "r1")}, "a setting takes nothing away in between"
    fleet.rebalance(1.0)
    assert fleet.homes == {digest: ("r0",)}


def test_a_copy_goes_to_the_replica_that_was_started_last_and_leaves_it_first() -> None:
    fleet = ReportingFleet()
    for index, started_s in enumerate((50.0, 10.0, 90.0, 40.0)):
        fleet.reporters[f"r{index}"] = DeltaReporter(replace(ORIGIN, started_s=started_s))
        fleet.hear(ReplicaReport(f"r{index}"), 0.0)
    (digest,) = digests(1)
    fleet.assign([digest])
    (home,) = fleet.homes[digest]
    fleet.hear(ReplicaReport(home, num_running=40, active={digest: 20}), 1.0)
    fleet.rebalance(1.0)
    order = ["r1", "r3", "r0", "r2"]
    newest = next(each for each in reversed(order) if each != home)
    assert fleet.homes[digest] == tuple(sorted((home, newest), key=order.index)), "homes are in order of age"
    fleet.hear(ReplicaReport(home), 2.0)
    fleet.rebalance(1.0 + 4 * TRAFFIC_S)
    assert fleet.homes[digest] == (min(home, newest, key=order.index),), "what Serve stops last is kept"


def test_a_crowd_gets_as_many_homes_as_it_fills_at_once() -> None:
    """One more each ten seconds would take minutes where one adapter has the work of eighty replicas."""
    fleet = ReportingFleet(100)
    first, second, third = digests(3)
    homes = fleet.assign([first, second, third])
    assert len({*homes.values()}) == 3
    for digest, count in ((first, 500), (second, 250), (third, 2)):
        fleet.hear(ReplicaReport(*homes[digest], num_running=count, active={digest: count}), 1.0)
    fleet.rebalance(1.0)
    bound = max(1.5 * 7.52, 7.52 + 4)
    assert len(fleet.homes[first]) == math.ceil(500 / bound)
    assert len(fleet.homes[second]) == math.ceil(250 / bound), "both in the same second"
    assert fleet.homes[third] == homes[third]
    shared = [each for digest in (first, second) for each in fleet.homes[digest]]
    assert len(set(shared)) == len(shared), "the second one goes where the first did not"
