"""The contract of placement policies, and the choice between the replicas that a policy allows.

A policy is a pure function of an adapter's digest and the fleet, so every process gets the same answer from the same
state. Of several allowed replicas two are drawn and the less loaded is taken (power of two choices, Mitzenmacher 2001),
so that processes with the same loads do not all choose the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict


class NoOptions(BaseModel):
    """Options of a policy that has none; base class of the options of others."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlacementFleet(Protocol):
    """What a policy may ask: the usable replicas and where adapters are. Each answer costs as much as it returns."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def num_assignments(self) -> int:
        """Assignments of adapters to replicas, on all replicas together."""
        ...

    def num_assigned_to(self, replica_id: str) -> int:
        """Adapters assigned to this replica."""
        ...

    def resident_replicas(self, digest: str) -> Sequence[str]:
        """Replicas whose device holds the adapter, in the adapter's order of preference."""
        ...

    def preference_order(self, digest: str) -> Iterator[str]:
        """All replicas in the adapter's order of preference (`rendezvous`)."""
        ...

    def load(self, replica_id: str) -> int:
        """Requests that the replica has, running and waiting."""
        ...

    def traffic_at(self, replica_id: str) -> float:
        """Mean number of requests that the replica had lately, as far as this process knows."""
        ...

    def num_rows(self, digest: str) -> int:
        """Rank rows of the adapter; 0 until a device has held it."""
        ...

    def num_rows_at(self, replica_id: str) -> int:
        """Rank rows of the adapters assigned to this replica. An adapter that no device has held counts as the mean of
        the others, or as one row. Costs time proportional to their number.
        """
        ...

    def num_rank_rows(self, replica_id: str) -> int:
        """Rank rows that the replica has."""
        ...

    def started_s(self, replica_id: str) -> float:
        """When the replica was started (Unix time): Serve stops the newest replicas first."""
        ...


class PlacementPolicy(Protocol):
    """Which replicas serve an adapter. An empty answer means any; without `has_affinity` it is always empty.

    A policy is a class named `Policy` in a file of `policies/`, or any class by its dotted path. Its `Options` are a
    pydantic model in the same file; it is constructed with the validated `placement.policy_options`.
    """

    Options: ClassVar[type[BaseModel]]
    has_affinity: ClassVar[bool]

    def __init__(self, options: Any) -> None: ...

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]: ...


@runtime_checkable
class BatchPlacementPolicy(Protocol):
    """A policy that assigns several adapters better together than one by one."""

    def assign_all(self, digests: Sequence[str], fleet: PlacementFleet) -> Mapping[str, tuple[str, ...]]:
        """Replicas for adapters that have none assigned. None of them counts in `fleet.num_assignments` yet."""
        ...


def less_loaded(candidates: Sequence[str], load: Callable[[str], int], draw: random.Random) -> str:
    """One of `candidates` (at least one): the less loaded of two random ones; the draw decides between equal loads."""
    if len(candidates) == 1:
        return candidates[0]
    first, second = draw.sample(candidates, 2)
    return first if load(first) <= load(second) else second
