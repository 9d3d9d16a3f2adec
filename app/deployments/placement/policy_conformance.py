"""What every placement policy must hold to, as checks that anybody's policy can run.

In: a function that makes the policy with its usual options. Out: nothing, or an AssertionError that says what is wrong.
Rule: the checks ask the policy what production asks, over production's own books, and nothing else. They need no Ray,
no cluster and no test framework. With pytest, all of them for one policy are

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_policy(check): check(lambda: MyPolicy(MyPolicy.Options()))
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError

from app.deployments.placement.messages import ReplicaDelta, ReplicaIdentity
from app.deployments.placement.policy import PlacementFleet, PlacementPolicy
from app.deployments.placement.state import PlacementState
from app.deployments.placement.view import UsableFleet

P = ParamSpec("P")
T = TypeVar("T")
MakePolicy = Callable[[], PlacementPolicy]

#: No replica may be home to more than this many times the mean number of adapters, of a thousand on ten replicas.
MOST_OF_MEAN = 2.0
#: What a question may cost, in answers of the fleet per replica: an ingress asks thousands of times a second.
MOST_ANSWERS = 8


def check_options(make: MakePolicy) -> None:
    """The options have defaults, and refuse a key that they do not know."""
    kind = type(make())
    assert issubclass(kind.Options, BaseModel), "Options is a pydantic model"
    assert isinstance(kind.has_homes, bool), "has_homes says whether adapters have homes at all"
    kind(kind.Options())
    try:
        kind.Options.model_validate({"no_such_option": 1})
    except ValidationError:
        return
    raise AssertionError('an unknown option must be refused: model_config = ConfigDict(extra="forbid")')


def check_homes_are_usable_replicas(make: MakePolicy) -> None:
    """Each home is a replica that may be used, and none is named twice; without replicas there are no homes."""
    policy = make()
    books = _books(policy, 6)
    usable = [each for each in books.view.replicas if each != "r2"]
    fleet = UsableFleet(books.view, usable, lambda _: 0)
    for digest in _digests(50):
        homes = policy.homes(digest, fleet)
        assert isinstance(homes, tuple), f"homes are a tuple, not {homes!r}"
        assert set(homes) <= set(usable), f"{homes} are not among the usable replicas {usable}"
        assert len(set(homes)) == len(homes), f"{homes} names a replica twice"
        assert bool(homes) == policy.has_homes, f"has_homes is {policy.has_homes} and the homes are {homes}"
    assert policy.homes(_digests(1)[0], UsableFleet(books.view, [], lambda _: 0)) == (), "there is nobody to be home"


def check_every_process_answers_alike(make: MakePolicy) -> None:
    """The answer depends on the digest and the fleet: not on the process, nor on what was asked before."""
    first, second = make(), make()
    fleets = [_fleet(_books(first, 5)), _fleet(_books(second, 5))]
    digests = _digests(40)
    answers = [first.homes(digest, fleets[0]) for digest in digests]
    assert [second.homes(digest, fleets[1]) for digest in reversed(digests)] == answers[::-1]
    assert [first.homes(digest, fleets[0]) for digest in digests] == answers, "it remembers what it was asked"


def check_a_replica_that_comes_moves_nothing(make: MakePolicy) -> None:
    """Homes stay when replicas come, and when the same adapters are asked for again."""
    books = _books(make(), 4)
    digests = _digests(200)
    before = books.assign(digests)
    _join(books, "new")
    assert books.assign(digests) == before


def check_a_replica_that_goes_moves_its_own(make: MakePolicy) -> None:
    """Only adapters whose home is gone are given another."""
    books = _books(make(), 5)
    digests = _digests(200)
    before = books.assign(digests)
    books.report(ReplicaDelta("r3", 2, is_leaving=True), 1.0)
    after = books.assign(digests)
    for digest, homes in before.items():
        left = tuple(home for home in homes if home != "r3")
        assert after[digest] == left or not left, f"{digest} moved from {homes} to {after[digest]}, though r3 left"
        assert "r3" not in after[digest]
    assert after.keys() == before.keys(), "an adapter has lost its home for good"


def check_no_replica_is_home_to_most(make: MakePolicy) -> None:
    """A thousand adapters are spread over ten replicas."""
    policy = make()
    books = _books(policy, 10)
    count = Counter(home for homes in books.assign(_digests(1000)).values() for home in homes)
    if policy.has_homes:
        most = max(count.values()) * 10 / count.total()
        assert most <= MOST_OF_MEAN, f"one replica is home to {most:.1f} times the mean: {dict(count)}"
        assert len(count) == 10, f"only {sorted(count)} of ten replicas are home to anything"


def check_a_question_is_cheap(make: MakePolicy) -> None:
    """The fleet is asked a number of times that grows no faster than the number of replicas."""
    policy = make()
    for num_replicas in (10, 100):
        books = _books(policy, num_replicas)
        books.assign(_digests(3 * num_replicas))
        fleet = _CountingFleet(_fleet(books))
        policy.homes("f" * 64, fleet)
        assert fleet.num_answers <= MOST_ANSWERS * num_replicas + 64, (
            f"one adapter cost {fleet.num_answers} answers of a fleet of {num_replicas} replicas"
        )


#: All of them.
CHECKS: tuple[Callable[[MakePolicy], None], ...] = (
    check_options,
    check_homes_are_usable_replicas,
    check_every_process_answers_alike,
    check_a_replica_that_comes_moves_nothing,
    check_a_replica_that_goes_moves_its_own,
    check_no_replica_is_home_to_most,
    check_a_question_is_cheap,
)


class _CountingFleet:
    """A fleet of exactly what a policy may ask, which counts its answers."""

    def __init__(self, fleet: PlacementFleet) -> None:
        self._fleet = fleet
        self.num_answers = 0

    @property
    def num_replicas(self) -> int:
        return self._fleet.num_replicas

    @property
    def num_homes(self) -> int:
        return self._fleet.num_homes

    def num_homes_at(self, replica_id: str) -> int:
        return self._counted(self._fleet.num_homes_at)(replica_id)

    def load(self, replica_id: str) -> int:
        return self._counted(self._fleet.load)(replica_id)

    def traffic_at(self, replica_id: str) -> float:
        return self._counted(self._fleet.traffic_at)(replica_id)

    def num_rows(self, digest: str) -> int:
        return self._counted(self._fleet.num_rows)(digest)

    def num_rows_at(self, replica_id: str) -> int:
        return self._counted(self._fleet.num_rows_at)(replica_id)

    def num_rank_rows(self, replica_id: str) -> int:
        return self._counted(self._fleet.num_rank_rows)(replica_id)

    def started_s(self, replica_id: str) -> float:
        return self._counted(self._fleet.started_s)(replica_id)

    def holders(self, digest: str) -> Sequence[str]:
        return self._counted(self._fleet.holders)(digest)

    def preferred(self, digest: str) -> Iterator[str]:
        for replica_id in self._fleet.preferred(digest):
            self.num_answers += 1
            yield replica_id

    def _counted(self, answer: Callable[P, T]) -> Callable[P, T]:
        self.num_answers += 1
        return answer


def _digests(count: int) -> list[str]:
    return [hashlib.sha256(str(index).encode()).hexdigest() for index in range(count)]


def _books(policy: PlacementPolicy, num_replicas: int) -> PlacementState:
    books = PlacementState(policy, heartbeat_timeout_s=10, report_interval_s=1)
    for index in range(num_replicas):
        _join(books, f"r{index}")
    return books


def _join(books: PlacementState, replica_id: str) -> None:
    news = ReplicaDelta(replica_id, 1, is_whole=True, origin=ReplicaIdentity("store", "{}", 0.0), num_rank_rows=256)
    assert books.report(news, 0.0)


def _fleet(books: PlacementState) -> UsableFleet:
    return UsableFleet(books.view, books.view.replicas, lambda _: 0)
