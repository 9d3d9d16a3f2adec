"""The policy without affinity, to compare others with: any replica may serve any adapter.

In: a digest and the fleet. Out: no homes, which means anywhere: a request goes where the load is less.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from app.deployments.placement.policy import NoOptions, PlacementFleet


class Policy:
    """Adapters are ignored."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    has_homes: ClassVar[bool] = False

    def __init__(self, options: NoOptions) -> None:
        """There is nothing to choose."""

    def homes(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:  # noqa: ARG002
        return ()
