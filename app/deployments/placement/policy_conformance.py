"""Conformance checks that any placement policy must pass.

A check takes a function that makes the policy with its usual options and raises AssertionError when a rule is broken.
It asks what production asks, over production's own state; it needs no Ray, cluster or test framework. With pytest:

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

#: No replica may get more than this many times the mean number of adapters, of a thousand on ten replicas.
MOST_OF_MEAN = 2.0
#: Fleet look-ups that one question may cost per replica: an ingress asks thousands of times a second.
MOST_ANSWERS = 8


def check_options(make: MakePolicy) -> None:
    """The options have defaults, and refuse an unknown key."""
    kind = type(make())
    assert issubclass(kind.Options, BaseModel), "Options must be a pydantic model"
    assert isinstance(kind.has_affinity, bool), "has_affinity must say whether adapters are assigned to replicas"
    kind(kind.Options())
    try:
        kind.Options.model_validate({"no_such_option": 1})
    except ValidationError:
        return
    raise AssertionError('an unknown option must be refused: model_config = ConfigDict(extra="forbid")')


def check_assigned_replicas_are_usable(make: MakePolicy) -> None:
    """Assigned replicas are usable, and none is named twice; without replicas none is assigned."""
    policy = make()
    state = _new_state(policy, 6)
    usable = [each for each in state.view.replicas if each != "r2"]
    fleet = UsableFleet(state.view, usable, lambda _: 0)
    for digest in _digests(50):
        assigned = policy.assign(digest, fleet)
        assert isinstance(assigned, tuple), f"assign must return a tuple, not {assigned!r}"
        assert set(assigned) <= set(usable), f"{assigned} are not among the usable replicas {usable}"
        assert len(set(assigned)) == len(assigned), f"{assigned} names a replica twice"
        assert bool(assigned) == policy.has_affinity, (
            f"has_affinity is {policy.has_affinity} but the answer is {assigned}"
        )
    assert policy.assign(_digests(1)[0], UsableFleet(state.view, [], lambda _: 0)) == (), (
        "there is no replica to assign"
    )


def check_every_process_answers_alike(make: MakePolicy) -> None:
    """The answer depends on the digest and the fleet, not on the process or on earlier questions."""
    first, second = make(), make()
    fleets = [_fleet(_new_state(first, 5)), _fleet(_new_state(second, 5))]
    digests = _digests(40)
    answers = [first.assign(digest, fleets[0]) for digest in digests]
    assert [second.assign(digest, fleets[1]) for digest in reversed(digests)] == answers[::-1]
    assert [first.assign(digest, fleets[0]) for digest in digests] == answers, "the answer depends on earlier questions"


def check_a_replica_that_comes_moves_nothing(make: MakePolicy) -> None:
    """Assignments stay when replicas come, and when the same adapters are asked for again."""
    state = _new_state(make(), 4)
    digests = _digests(200)
    before = state.assign(digests)
    _join(state, "new")
    assert state.assign(digests) == before


def check_a_replica_that_goes_moves_its_own(make: MakePolicy) -> None:
    """Only adapters whose replica is gone are assigned another."""
    state = _new_state(make(), 5)
    digests = _digests(200)
    before = state.assign(digests)
    state.report(ReplicaDelta("r3", 2, is_draining=True), 1.0)
    after = state.assign(digests)
    for digest, assigned in before.items():
        remaining = tuple(each for each in assigned if each != "r3")
        assert after[digest] == remaining or not remaining, f"{digest} moved from {assigned} to {after[digest]}"
        assert "r3" not in after[digest]
    assert after.keys() == before.keys(), "an adapter was not assigned again"


def check_adapters_are_spread(make: MakePolicy) -> None:
    """A thousand adapters are spread over ten replicas."""
    policy = make()
    state = _new_state(policy, 10)
    count = Counter(each for assigned in state.assign(_digests(1000)).values() for each in assigned)
    if policy.has_affinity:
        most = max(count.values()) * 10 / count.total()
        assert most <= MOST_OF_MEAN, f"one replica has {most:.1f} times the mean: {dict(count)}"
        assert len(count) == 10, f"only {sorted(count)} of ten replicas have adapters"


def check_a_question_is_cheap(make: MakePolicy) -> None:
    """The number of look-ups grows no faster than the number of replicas."""
    policy = make()
    for num_replicas in (10, 100):
        state = _new_state(policy, num_replicas)
        state.assign(_digests(3 * num_replicas))
        fleet = _CountingFleet(_fleet(state))
        policy.assign("f" * 64, fleet)
        assert fleet.num_answers <= MOST_ANSWERS * num_replicas + 64, (
            f"one adapter cost {fleet.num_answers} answers of a fleet of {num_replicas} replicas"
        )


#: All of them.
CHECKS: tuple[Callable[[MakePolicy], None], ...] = (
    check_options,
    check_assigned_replicas_are_usable,
    check_every_process_answers_alike,
    check_a_replica_that_comes_moves_nothing,
    check_a_replica_that_goes_moves_its_own,
    check_adapters_are_spread,
    check_a_question_is_cheap,
)


class _CountingFleet:
    """A fleet with exactly the policy's interface, which counts its answers."""

    def __init__(self, fleet: PlacementFleet) -> None:
        self._fleet = fleet
        self.num_answers = 0

    @property
    def num_replicas(self) -> int:
        return self._fleet.num_replicas

    @property
    def num_assignments(self) -> int:
        return self._fleet.num_assignments

    def num_assigned_to(self, replica_id: str) -> int:
        return self._count(self._fleet.num_assigned_to)(replica_id)

    def load(self, replica_id: str) -> int:
        return self._count(self._fleet.load)(replica_id)

    def traffic_at(self, replica_id: str) -> float:
        return self._count(self._fleet.traffic_at)(replica_id)

    def num_rows(self, digest: str) -> int:
        return self._count(self._fleet.num_rows)(digest)

    def num_rows_at(self, replica_id: str) -> int:
        return self._count(self._fleet.num_rows_at)(replica_id)

    def num_rank_rows(self, replica_id: str) -> int:
        return self._count(self._fleet.num_rank_rows)(replica_id)

    def started_s(self, replica_id: str) -> float:
        return self._count(self._fleet.started_s)(replica_id)

    def resident_replicas(self, digest: str) -> Sequence[str]:
        return self._count(self._fleet.resident_replicas)(digest)

    def preference_order(self, digest: str) -> Iterator[str]:
        for replica_id in self._fleet.preference_order(digest):
            self.num_answers += 1
            yield replica_id

    def _count(self, answer: Callable[P, T]) -> Callable[P, T]:
        self.num_answers += 1
        return answer


def _digests(count: int) -> list[str]:
    return [hashlib.sha256(str(index).encode()).hexdigest() for index in range(count)]


def _new_state(policy: PlacementPolicy, num_replicas: int) -> PlacementState:
    state = PlacementState(policy, heartbeat_timeout_s=10, report_interval_s=1)
    for index in range(num_replicas):
        _join(state, f"r{index}")
    return state


def _join(state: PlacementState, replica_id: str) -> None:
    delta = ReplicaDelta(replica_id, 1, is_whole=True, identity=ReplicaIdentity("store", "{}", 0.0), num_rank_rows=256)
    assert state.report(delta, 0.0)


def _fleet(state: PlacementState) -> UsableFleet:
    return UsableFleet(state.view, state.view.replicas, lambda _: 0)
