"""Adapters go where their digest says: rendezvous hashing alone (Thaler & Ravishankar 1998).

In: a digest and the fleet. Out: the replicas that the digest prefers. Rule: the answer depends on the digest and on
which replicas there are, on nothing else, so that it is the same after any restart. Nothing bounds how many adapters a
replica is home to: of 1,000 adapters on 10 replicas one gets some 120. `sticky` adds the bound.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class RendezvousOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    num_homes: int = Field(default=1, ge=1, description="How many replicas serve each adapter.")


class Policy:
    """The first replicas in the adapter's own order."""

    Options: ClassVar[type[BaseModel]] = RendezvousOptions
    has_homes: ClassVar[bool] = True

    def __init__(self, options: RendezvousOptions) -> None:
        self._num_homes = options.num_homes

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        return tuple(islice(fleet.preferred(digest), self._num_homes))
