"""The default policy: an adapter stays where its rows are.

Otherwise rendezvous hashing with bounded loads (Mirrokni et al. 2018): no replica gets more than `load_bound` times the
mean number of adapters, and losing a replica moves its own adapters only.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class StickyOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    load_bound: float = Field(
        default=1.25, ge=1.0, description="A replica gets at most this times the mean number of adapters."
    )


class Policy:
    """Assigns the replica that has the adapter's rows, else its first preferred replica with room under the bound."""

    Options: ClassVar[type[BaseModel]] = StickyOptions
    has_affinity: ClassVar[bool] = True

    def __init__(self, options: StickyOptions) -> None:
        self._load_bound = options.load_bound

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        if resident_on := fleet.resident_replicas(digest):
            return (resident_on[0],)
        capacity = math.ceil(self._load_bound * (fleet.num_assignments + 1) / fleet.num_replicas)
        return (next(each for each in fleet.preference_order(digest) if fleet.num_assigned_to(each) < capacity),)
