"""Policy that assigns the replica with the fewest adapters.

The counts differ by at most one while no replica comes or goes. Residency is ignored: a new replica gets every new
adapter until it has as many as the others.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from app.deployments.placement.policy import NoOptions, PlacementFleet


class Policy:
    """Assigns the replica with the fewest adapters; among equals the preferred one."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    has_affinity: ClassVar[bool] = True

    def __init__(self, options: NoOptions) -> None:
        """There are no options."""

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        if not fleet.num_replicas:
            return ()
        return (min(fleet.preference_order(digest), key=fleet.num_assigned_to),)
