"""What one process knows of placement, and how it asks for homes.

In: adapters that need a home, replicas that were lost. Out: the placement table, read from this process's memory.
`Placer` is all that a dispatcher needs; `ServePlacer` is one over the placement actor. An actor that is away costs
freshness, never an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from app.deployments.links.watched import Watched
from app.deployments.placement.client import PlacementClient
from app.deployments.placement.table import PlacementTable
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: Longest wait for placement's answer before the ingress decides by itself.
ASSIGN_TIMEOUT_S = 0.5


class Placer(Protocol):
    """What the dispatcher asks of placement: the table, and homes for adapters that have none."""

    @property
    def table(self) -> PlacementTable: ...

    async def assign(self, digests: Sequence[str]) -> None:
        """Find homes for these adapters; returns (not raises) when nobody can be asked."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Wait for a new table, at most this long."""
        ...

    async def gone(self, replica_id: str) -> None:
        """Tell the others that a replica is not to be used for now."""
        ...


class ServePlacer:
    """`Placer` over the placement actor."""

    def __init__(self, client: PlacementClient, watched: Watched[PlacementTable]) -> None:
        self._client = client
        self._watched = watched

    @property
    def table(self) -> PlacementTable:
        return self._watched.value

    async def assign(self, digests: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ASSIGN_TIMEOUT_S):
                self._watched.take(*await self._client.assign(digests))
        except (TimeoutError, NotReady) as error:
            logger.warning("placement does not answer (%s); deciding from the last table", str(error) or "too late")

    async def changed(self, timeout_s: float) -> None:
        await self._watched.changed(timeout_s)

    async def gone(self, replica_id: str) -> None:
        try:
            await self._client.gone(replica_id)
        except NotReady as error:
            logger.warning("%s; placement will miss the replica's reports instead", error)
