"""Adapters are spread by the rank rows that they take, not by their number.

In: a digest and the fleet. Out: one home. Of the first replicas in the adapter's own order the one takes it whose
adapters take the least of its rows, so that one adapter of rank 128 counts like sixteen of rank 8. Rule: an adapter
stays where its rows are. What it takes is known once any device has held it; until then it counts like the mean.

Our kernels compute each adapter with its own rank, whatever else is in the batch: what a large one takes from small
ones is rows, and their share of a step. A replica of a larger table gets as many more of them.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class RankOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    candidates: int = Field(default=8, ge=2, description="Replicas that are compared for one adapter.")


class Policy:
    """An adapter goes where its rows are, else to the emptiest of the replicas that it prefers."""

    Options: ClassVar[type[BaseModel]] = RankOptions
    has_homes: ClassVar[bool] = True

    def __init__(self, options: RankOptions) -> None:
        self._candidates = options.candidates

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        if holders := fleet.holders(digest):
            return (holders[0],)
        candidates = [*islice(fleet.preferred(digest), self._candidates)]
        return (min(candidates, key=lambda each: fleet.num_rows_at(each) / (fleet.num_rank_rows(each) or 1)),)
