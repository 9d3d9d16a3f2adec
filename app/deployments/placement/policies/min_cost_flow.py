"""Policy that assigns adapters of one call together, at the least total cost.

The cost of a place grows with the replica's position in the adapter's order of preference and with how full it gets,
and falls where the adapter's rows already are. Each adapter takes one of the places that replicas have under the bound,
and no other assignment costs less (SciPy's `linear_sum_assignment`, Crouse 2016). Assigned one by one, an adapter may
take the only place that the next one could have kept; docs/how-to/autoscale.md has the measured gain. A solution
takes a few milliseconds; more than `MAX_TOGETHER` adapters are solved in several. Adapters that are assigned already do
not move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, Field
from scipy.optimize import linear_sum_assignment

from app.deployments.placement.policy import NoOptions, PlacementFleet

#: Adapters per solution: the time grows with the third power.
MAX_TOGETHER = 64
#: The cost of an impossible place: more than all others together.
_NEVER = 1e9


class FlowOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    candidates: int = Field(default=16, ge=2, description="Number of replicas compared for one adapter.")
    load_bound: float = Field(
        default=1.25, ge=1.0, description="A replica gets at most this times the mean number of adapters."
    )
    order_price: float = Field(
        default=1.0, ge=0, description="Cost of the last candidate in the adapter's order of preference."
    )
    fill_price: float = Field(default=4.0, ge=0, description="Cost of a replica that has the mean number of adapters.")
    keep_gain: float = Field(
        default=16.0, ge=0, description="Discount for a replica that already has the adapter's rows."
    )


class Policy:
    """Replicas for many adapters at once."""

    Options: ClassVar[type[BaseModel]] = FlowOptions
    has_affinity: ClassVar[bool] = True

    def __init__(self, options: FlowOptions) -> None:
        self._options = options

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        return self.assign_all([digest], fleet).get(digest, ())

    def assign_all(self, digests: Sequence[str], fleet: PlacementFleet) -> Mapping[str, tuple[str, ...]]:
        if not fleet.num_replicas:
            return {}
        chosen: dict[str, tuple[str, ...]] = {}
        given: dict[str, int] = {}
        for first in range(0, len(digests), MAX_TOGETHER):
            for digest, replica_id in self._solve(digests[first : first + MAX_TOGETHER], fleet, given, len(chosen)):
                chosen[digest] = (replica_id,)
                given[replica_id] = given.get(replica_id, 0) + 1
        return chosen

    def _solve(
        self, digests: Sequence[str], fleet: PlacementFleet, given: Mapping[str, int], num_given: int
    ) -> list[tuple[str, str]]:
        """given: adapters that replicas got in earlier solutions of this call."""
        options = self._options
        mean = (fleet.num_assignments + num_given + len(digests)) / fleet.num_replicas
        capacity = math.ceil(options.load_bound * mean)
        taken: dict[str, int] = {}
        wishes: list[dict[str, float]] = []
        for digest in digests:
            wish: dict[str, float] = {}
            resident_on = fleet.resident_replicas(digest)
            for replica_id in (*resident_on, *fleet.preference_order(digest)):
                if replica_id in wish:
                    continue
                if replica_id not in taken:
                    taken[replica_id] = fleet.num_assigned_to(replica_id) + given.get(replica_id, 0)
                is_resident = replica_id in resident_on
                if taken[replica_id] < capacity or is_resident:
                    order = options.order_price * len(wish) / options.candidates
                    wish[replica_id] = order - (options.keep_gain if is_resident else 0.0)
                    if len(wish) >= options.candidates:
                        break
            wishes.append(wish)
        places = [
            (replica_id, options.fill_price * (taken[replica_id] + nth) / mean)
            for replica_id in sorted({each for wish in wishes for each in wish})
            for nth in range(min(len(digests), max(1, capacity - taken[replica_id])))
        ]
        costs = np.full((len(digests), len(places)), _NEVER)
        for row, wish in enumerate(wishes):
            for column, (replica_id, fill) in enumerate(places):
                if replica_id in wish:
                    costs[row, column] = wish[replica_id] + fill
        rows, columns = linear_sum_assignment(costs)
        return [
            (digests[row], places[column][0])
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
            if costs[row, column] < _NEVER
        ]
