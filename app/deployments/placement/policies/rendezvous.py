"""Policy of plain rendezvous hashing (Thaler & Ravishankar 1998).

The answer depends only on the digest and the set of replicas, so it survives any restart. Nothing bounds the adapters
of one replica: of 1,000 adapters on 10 replicas one gets about 120. `sticky` adds the bound.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from pydantic import BaseModel, Field

from app.deployments.placement.policy import NoOptions, PlacementFleet


class RendezvousOptions(NoOptions):
    """`placement.policy_options` of this policy."""

    num_replicas: int = Field(default=1, ge=1, description="Number of replicas that serve each adapter.")


class Policy:
    """Assigns the first replicas in the adapter's order of preference."""

    Options: ClassVar[type[BaseModel]] = RendezvousOptions
    has_affinity: ClassVar[bool] = True

    def __init__(self, options: RendezvousOptions) -> None:
        self._num_replicas = options.num_replicas

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:
        return tuple(islice(fleet.preference_order(digest), self._num_replicas))
