"""Which replica one request goes to: its adapter's homes first, the less loaded of two that are drawn."""

from __future__ import annotations

import random
from collections import Counter

from app.deployments.placement.policy import less_loaded
from app.deployments.placement.view import Rendezvous, UsableFleet
from tests.deployments.placement.reporting_fleet import LEAST_LOADED, STICKY, ReportingFleet, digests


def no_load(_: str) -> int:
    return 0


def test_every_process_chooses_the_same_without_the_actor() -> None:
    views = [ReportingFleet(5).view for _ in range(3)]
    for digest in digests(40):
        fleets = [UsableFleet(view, view.replicas, no_load) for view in views]
        chosen = {STICKY.assign(digest, fleet) for fleet in fleets}
        assert chosen == {(next(Rendezvous(views[0].replicas).preference_order(digest)),)}
        assert LEAST_LOADED.assign(digest, fleets[0]) == ()


def test_a_replica_that_comes_or_goes_changes_no_other_s_place() -> None:
    few, many = Rendezvous(["a", "b", "c"]), Rendezvous(["a", "b", "c", "d"])
    firsts = Counter()
    for digest in digests(400):
        order = [*many.preference_order(digest)]
        assert [each for each in order if each != "d"] == [*few.preference_order(digest)]
        firsts[order[0]] += 1
    assert all(60 < firsts[each] < 140 for each in "abcd")
    assert [*Rendezvous().preference_order("digest")] == []


def test_two_are_drawn_and_the_less_loaded_is_taken() -> None:
    draw, loads = random.Random(0), {"a": 4, "b": 1, "c": 2}
    assert less_loaded(["a"], loads.__getitem__, draw) == "a"
    assert {less_loaded(["a", "b"], loads.__getitem__, draw) for _ in range(20)} == {"b"}
    taken = Counter(less_loaded([*loads], loads.__getitem__, draw) for _ in range(600))
    assert set(taken) == {"b", "c"}, "the most loaded of three loses against any"
    assert 340 < taken["b"] < 460, "b is in two of three pairs"
    even = Counter(less_loaded(["a", "b"], no_load, draw) for _ in range(200))
    assert min(even.values()) > 60, "equal loads: either"


def test_a_home_that_cannot_be_used_is_none() -> None:
    books = ReportingFleet(4)
    (digest,) = digests(1)
    books.assign([digest])
    (home,) = books.homes[digest]
    usable = [each for each in books.replicas if each != home]
    (other,) = STICKY.assign(digest, UsableFleet(books.view, usable, no_load))
    assert other == next(each for each in books.view.preference_order(digest) if each != home)
    assert STICKY.assign(digest, UsableFleet(books.view, [], no_load)) == ()
