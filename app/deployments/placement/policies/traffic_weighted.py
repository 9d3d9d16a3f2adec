"""Adapters go where the least has been going on.

In: a digest and the fleet. Out: one home. Of the first replicas in the adapter's own order with room under the bound,
the one takes it that has had the fewest requests lately. Rule: it stays where its rows are. Numbers of adapters say
little about work when few adapters have most of the requests: this policy keeps new ones away from those few.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class TrafficOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    candidates: int = Field(default=8, ge=2, description="Replicas that are compared for one adapter.")
    load_bound: float = Field(
        default=2.0, ge=1.0, description="A replica is given at most this times the mean number of adapters."
    )


class Policy:
    """An adapter goes where its rows are, else to the least used of the replicas that it prefers."""

    Options: ClassVar[type[BaseModel]] = TrafficOptions
    has_homes: ClassVar[bool] = True

    def __init__(self, options: TrafficOptions) -> None:
        self._candidates = options.candidates
        self._load_bound = options.load_bound

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        if holders := fleet.holders(digest):
            return (holders[0],)
        mean = (fleet.num_homes + 1) / fleet.num_replicas
        capacity = math.ceil(self._load_bound * mean)
        having_room = (each for each in fleet.preferred(digest) if fleet.num_homes_at(each) < capacity)
        candidates = [*islice(having_room, self._candidates)]
        used = max(1.0, sum(map(fleet.traffic_at, candidates)) / len(candidates))
        # Between two reports traffic stands still: the homes that were given meanwhile keep adapters from going to one.
        return (min(candidates, key=lambda each: fleet.traffic_at(each) / used + fleet.num_homes_at(each) / mean),)
