"""Policy that spreads adapters by their rank rows, not by their number.

Among the first replicas in the adapter's order of preference, the one whose adapters take the smallest part of its rank
rows is assigned: one adapter of rank 128 counts like sixteen of rank 8, and a replica with more rows gets more. The
kernels compute each adapter with its own rank, so rows are what a large adapter takes from small ones. An adapter stays
where its rows are. Until a device has held it, it counts as the mean.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class RankOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    candidates: int = Field(default=8, ge=2, description="Number of replicas compared for one adapter.")


class Policy:
    """Assigns the replica that has the adapter's rows, else the emptiest of the preferred ones."""

    Options: ClassVar[type[BaseModel]] = RankOptions
    has_affinity: ClassVar[bool] = True

    def __init__(self, options: RankOptions) -> None:
        self._candidates = options.candidates

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        if resident_on := fleet.resident_replicas(digest):
            return (resident_on[0],)
        candidates = [*islice(fleet.preference_order(digest), self._candidates)]
        return (min(candidates, key=lambda each: fleet.num_rows_at(each) / (fleet.num_rank_rows(each) or 1)),)
