"""Policy without affinity, as a baseline: any replica may serve any adapter, so the less loaded one is taken."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from app.deployments.placement.policy import NoOptions, PlacementFleet


class Policy:
    """Ignores adapters."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    has_affinity: ClassVar[bool] = False

    def __init__(self, options: NoOptions) -> None:
        """There are no options."""

    def assign(self, digest: str, fleet: PlacementFleet) -> tuple[str, ...]:  # noqa: ARG002
        return ()
