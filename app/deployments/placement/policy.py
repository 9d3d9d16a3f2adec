"""What a placement policy is asked and answers, and how one request uses the answer.

In: an adapter's digest and the fleet as one process knows it. Out: the replicas that may serve the adapter, and for one
request one of them. Nothing here remembers anything: the same fleet gives the same homes in every process. Rule: of
many replicas that may serve a request, two are drawn and the less loaded is taken (Mitzenmacher 2001), so that
processes that know the same loads do not all send to the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict


class NoOptions(BaseModel):
    """The options of a policy that has none; the base of those that have some."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlacementFleet(Protocol):
    """The usable replicas and where adapters are, as far as a policy may ask. Every answer costs what it returns."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def num_homes(self) -> int:
        """Homes that adapters have on all replicas together."""
        ...

    def num_homes_at(self, replica_id: str) -> int:
        """Adapters whose home this replica is."""
        ...

    def holders(self, digest: str) -> Sequence[str]:
        """Replicas whose device holds the adapter, in the order in which it prefers them."""
        ...

    def preferred(self, digest: str) -> Iterator[str]:
        """All replicas in the adapter's own order (`rendezvous`)."""
        ...

    def load(self, replica_id: str) -> int:
        """Requests that the replica has, running and waiting."""
        ...

    def traffic_at(self, replica_id: str) -> float:
        """Requests that the replica has had at a time on average lately, as far as this process knows."""
        ...

    def num_rows(self, digest: str) -> int:
        """Rank rows that the adapter takes; 0 as long as no device has held it."""
        ...

    def num_rows_at(self, replica_id: str) -> int:
        """Rank rows that the adapters take whose home this replica is; one that no device has held yet counts like the
        mean of the others, or as one row. Costs their number."""
        ...

    def num_rank_rows(self, replica_id: str) -> int:
        """Rank rows that the replica has."""
        ...

    def started_s(self, replica_id: str) -> float:
        """When the replica was started (Unix time): Serve stops those first that were started last."""
        ...


class PlacementPolicy(Protocol):
    """Where an adapter may be served. An empty answer means anywhere; without `has_homes` it is always empty.

    A policy is a class named `Policy` in a file of `policies/`, or anywhere else by its dotted path. Its `Options` are
    a model of its own, in the same file, and it is made with one: `placement.policy_options`.
    """

    Options: ClassVar[type[BaseModel]]
    has_homes: ClassVar[bool]

    def __init__(self, options: Any) -> None: ...

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]: ...


@runtime_checkable
class BatchPlacementPolicy(Protocol):
    """What a policy has besides if it places adapters better together than one by one."""

    def homes_of_all(self, digests: Sequence[str], fleet: PlacementFleet) -> Mapping[str, tuple[str, ...]]:
        """The homes of adapters that have none. None of them is among `fleet.num_homes` yet."""
        ...


def less_loaded(candidates: Sequence[str], load: Callable[[str], int], draw: random.Random) -> str:
    """One of `candidates` (at least one): the less loaded of two random ones; equal loads are decided by the draw."""
    if len(candidates) == 1:
        return candidates[0]
    first, second = draw.sample(candidates, 2)
    return first if load(first) <= load(second) else second
