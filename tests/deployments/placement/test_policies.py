"""What distinguishes the policies that come with the service, and what all of them hold to."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable

import pytest

from app.config import PlacementConfig
from app.deployments.placement import policies
from app.deployments.placement.messages import ReplicaReport
from app.deployments.placement.policy import PlacementFleet, PlacementPolicy
from app.deployments.placement.policy_conformance import CHECKS, MakePolicy, check_adapters_are_spread
from app.deployments.placement.replica_choice import make_policy
from tests.deployments.placement.reporting_fleet import ReportingFleet, digests

NAMES = [module.name for module in pkgutil.iter_modules(policies.__path__)]


def policy(name: str, **options: float) -> PlacementPolicy:
    return make_policy(PlacementConfig(policy=name, policy_options=options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_policy_conforms(name: str, check: Callable[[MakePolicy], None]) -> None:
    check(lambda: policy(name))


def test_a_policy_that_sends_all_to_one_replica_does_not_conform() -> None:
    class Favourite:
        Options = policy("sticky").Options
        has_affinity = True

        def __init__(self, options: object) -> None: ...

        def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:  # noqa: ARG002
            return ("r0",) if fleet.num_replicas else ()

    with pytest.raises(AssertionError, match=r"one replica has 10\.0 times the mean"):
        check_adapters_are_spread(lambda: Favourite(None))


def num_homes(books: ReportingFleet) -> Counter[str]:
    return Counter(home for homes in books.homes.values() for home in homes)


def test_round_robin_deals_out_one_each() -> None:
    books = ReportingFleet(7, policy("round_robin"))
    books.assign(digests(100))
    assert sorted(num_homes(books).values()) == [14] * 5 + [15] * 2


def test_rendezvous_gives_the_same_homes_whatever_was_there_before() -> None:
    books, later = (
        ReportingFleet(5, policy("rendezvous", num_replicas=2)),
        ReportingFleet(5, policy("rendezvous", num_replicas=2)),
    )
    later.assign(digests(300, seed=1))
    assert books.assign(digests(50)) == later.assign(digests(50))
    assert all(len(homes) == 2 for homes in books.homes.values())


def test_new_adapters_keep_away_from_where_the_traffic_is() -> None:
    books = ReportingFleet(4, policy("traffic_weighted"))
    for second in range(60):
        for replica_id in books.replicas:
            books.hear(ReplicaReport(replica_id, num_running=40 if replica_id == "r1" else 2), float(second))
    books.assign(digests(60))
    others = {each: count for each, count in num_homes(books).items() if each != "r1"}
    assert num_homes(books)["r1"] <= min(others.values()) / 3
    assert max(others.values()) - min(others.values()) <= 4, "and are spread over the others"


def test_rows_count_and_not_adapters() -> None:
    books = ReportingFleet(2, policy("rank_aware"))
    large, *small = digests(17)
    held = {"r0": (large,), "r1": tuple(sorted(small))}
    for replica_id, resident in held.items():
        rows = dict.fromkeys(resident, 128 if replica_id == "r0" else 8)
        books.hear(ReplicaReport(replica_id, resident=resident, num_rows=rows, num_rank_rows=256), 1.0)
    books.assign([large, *small])
    assert num_homes(books) == {"r0": 1, "r1": 16}, "they stay where their rows are"
    new = digests(34, seed=1)
    books.assign(new)
    after = num_homes(books)
    assert abs(after["r0"] + 15 - after["r1"]) <= 4, "an adapter nobody has read counts like the mean of all"
    for replica_id, before in held.items():
        came = (each for each in new if books.homes[each] == (replica_id,))
        resident = tuple(sorted((*before, *came)))
        rows = dict.fromkeys(resident, 8) | {large: 128}
        books.hear(ReplicaReport(replica_id, resident=resident, num_rows=rows, num_rank_rows=256), 2.0)
    books.assign(digests(100, seed=2))
    rows_at = {each: 8 * count + (120 if each == "r0" else 0) for each, count in num_homes(books).items()}
    assert abs(rows_at["r0"] - rows_at["r1"]) <= 160


def test_a_replica_with_more_rows_gets_more_adapters() -> None:
    books = ReportingFleet(0, policy("rank_aware"))
    books.hear(ReplicaReport("small", num_rank_rows=64), 0.0)
    books.hear(ReplicaReport("large", num_rank_rows=192), 0.0)
    books.assign(digests(80))
    assert 57 <= num_homes(books)["large"] <= 63


def test_the_cheapest_places_for_all_are_no_worse_than_one_after_the_other() -> None:
    """How many adapters of a lost replica get the first replica of their own order, placed together and one by one."""
    flow, sticky = ReportingFleet(6, policy("min_cost_flow")), ReportingFleet(6, policy("sticky"))
    first_choices = []
    for books in (flow, sticky):
        new = digests(300)
        books.assign(new)
        first_choices.append(sum(books.homes[each] == (next(books.view.preference_order(each)),) for each in new))
        assert max(num_homes(books).values()) <= 63, "the bound is 1.25 times the mean of 50"
    assert first_choices[0] > 150
    assert max(num_homes(flow).values()) <= max(num_homes(sticky).values())


def test_together_placed_adapters_stay_where_their_rows_are() -> None:
    books = ReportingFleet(4, policy("min_cost_flow"))
    new = digests(40)
    books.hear(ReplicaReport("r2", resident=tuple(sorted(new[:5]))), 1.0)
    homes = books.assign(new)
    assert {homes[each] for each in new[:5]} == {("r2",)}
    assert max(num_homes(books).values()) <= 13
