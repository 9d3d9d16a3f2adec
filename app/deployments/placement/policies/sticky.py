"""The default policy: an adapter stays where its rows are.

In: a digest and the fleet. Out: one home. Rendezvous hashing with bounded loads (Mirrokni et al. 2018): no replica is
home to more than `load_bound` times the mean, and losing a replica moves its own adapters only.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class StickyOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    load_bound: float = Field(
        default=1.25, ge=1.0, description="A replica is given at most this times the mean number of adapters."
    )


class Policy:
    """An adapter goes where its rows are, else to its rendezvous replica with room under the bound."""

    Options: ClassVar[type[BaseModel]] = StickyOptions
    has_homes: ClassVar[bool] = True

    def __init__(self, options: StickyOptions) -> None:
        self._load_bound = options.load_bound

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        if holders := fleet.holders(digest):
            return (holders[0],)
        capacity = math.ceil(self._load_bound * (fleet.num_homes + 1) / fleet.num_replicas)
        return (next(each for each in fleet.preferred(digest) if fleet.num_homes_at(each) < capacity),)
