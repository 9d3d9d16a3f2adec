"""Policy that assigns the replica with the least recent traffic.

It compares the first replicas in the adapter's order of preference that have room under the bound. An adapter stays
where its rows are. When few adapters have most of the requests, their number says little about work: this policy keeps
new adapters away from those few.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class TrafficOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    candidates: int = Field(default=8, ge=2, description="Number of replicas compared for one adapter.")
    load_bound: float = Field(
        default=2.0, ge=1.0, description="A replica gets at most this times the mean number of adapters."
    )


class Policy:
    """Assigns the replica that has the adapter's rows, else the least used of the preferred ones."""

    Options: ClassVar[type[BaseModel]] = TrafficOptions
    has_affinity: ClassVar[bool] = True

    def __init__(self, options: TrafficOptions) -> None:
        self._candidates = options.candidates
        self._load_bound = options.load_bound

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        if resident_on := fleet.resident_replicas(digest):
            return (resident_on[0],)
        mean = (fleet.num_assignments + 1) / fleet.num_replicas
        capacity = math.ceil(self._load_bound * mean)
        having_room = (each for each in fleet.preference_order(digest) if fleet.num_assigned_to(each) < capacity)
        candidates = [*islice(having_room, self._candidates)]
        used = max(1.0, sum(map(fleet.traffic_at, candidates)) / len(candidates))
        # Traffic is constant between two reports: counting assignments spreads new adapters meanwhile.
        return (min(candidates, key=lambda each: fleet.traffic_at(each) / used + fleet.num_assigned_to(each) / mean),)
