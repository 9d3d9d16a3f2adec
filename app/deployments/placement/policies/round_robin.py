"""Adapters are dealt out to the replicas in turn.

In: a digest and the fleet. Out: one home, the replica that is home to the fewest adapters. Rule: their numbers differ
by one at most while no replica comes or goes. Where an adapter's rows are does not count: a replica that has just
started gets every new adapter until it has as many as the others.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from app.deployments.placement.policy import NoOptions, PlacementFleet


class Policy:
    """An adapter goes where the fewest are; of several such replicas to the one that it prefers."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    has_homes: ClassVar[bool] = True

    def __init__(self, options: NoOptions) -> None:
        """There is nothing to choose."""

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        return (min(fleet.preferred(digest), key=fleet.num_homes_at),)
