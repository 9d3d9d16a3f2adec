"""Adapters that come together are placed together, at the least cost for all of them.

In: digests and the fleet. Out: one home each. What is paid for a place: how far it stands from the front of the
adapter's own order, how full the replica gets, and less where the rows are already. Rule: each adapter takes one of the
places that replicas have under the bound, and no other choice of places costs less: a flow of least cost with one unit
per adapter, solved by SciPy (`linear_sum_assignment`, Crouse 2016). Adapters that have a home are not moved.

Placed one by one, an adapter may take the only place that the next one could have kept. One solution costs a few
milliseconds; more adapters than `MAX_TOGETHER` are placed in several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, Field
from scipy.optimize import linear_sum_assignment

from app.deployments.placement.policy import NoOptions, PlacementFleet

#: Adapters of one solution: the time grows with the third power.
MAX_TOGETHER = 64
#: The price of a place that cannot be had: above what all others together cost.
_NEVER = 1e9


class FlowOptions(NoOptions):
    """`placement.policy_options` of this policy: the prices of a place, and what is compared."""

    candidates: int = Field(default=16, ge=2, description="Replicas that are compared for one adapter.")
    load_bound: float = Field(
        default=1.25, ge=1.0, description="A replica is given at most this times the mean number of adapters."
    )
    order_price: float = Field(
        default=1.0, ge=0, description="Of the last of the candidates in the adapter's own order."
    )
    fill_price: float = Field(default=4.0, ge=0, description="Of a replica that has as many adapters as the mean.")
    keep_gain: float = Field(default=16.0, ge=0, description="What a place is cheaper by where the rows are already.")


class Policy:
    """Homes for many adapters at once."""

    Options: ClassVar[type[BaseModel]] = FlowOptions
    has_homes: ClassVar[bool] = True

    def __init__(self, options: FlowOptions) -> None:
        self._options = options

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        return self.homes_of_all([digest], fleet).get(digest, ())

    def homes_of_all(self, digests: Sequence[str], fleet: PlacementFleet) -> Mapping[str, tuple[str, ...]]:
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
        """given: adapters that replicas got in the solutions before this one."""
        options = self._options
        mean = (fleet.num_homes + num_given + len(digests)) / fleet.num_replicas
        capacity = math.ceil(options.load_bound * mean)
        taken: dict[str, int] = {}
        wishes: list[dict[str, float]] = []
        for digest in digests:
            wish: dict[str, float] = {}
            holders = fleet.holders(digest)
            for replica_id in (*holders, *fleet.preferred(digest)):
                if replica_id in wish:
                    continue
                if replica_id not in taken:
                    taken[replica_id] = fleet.num_homes_at(replica_id) + given.get(replica_id, 0)
                is_holder = replica_id in holders
                if taken[replica_id] < capacity or is_holder:
                    order = options.order_price * len(wish) / options.candidates
                    wish[replica_id] = order - (options.keep_gain if is_holder else 0.0)
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
