"""How ingresses and replicas ask placement: a typed method per call.

In: the placement actor. Out: what `PlacementService` answers, or the exception that it raised. mypy checks each call
against the service's method of the same name. All of them raise ActorAway (a NotReady) while placement restarts.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.links.published import Version
from app.deployments.links.ray_calls import Callee
from app.deployments.placement.service import PlacementService
from app.deployments.placement.table import PlacementTable, ReplicaReport


class PlacementClient:
    """Several may share an actor."""

    def __init__(self, actor: Callee, store: str) -> None:
        """`store`: the name of the adapter store's actor that this process works with."""
        self._actor = actor
        self._store = store

    async def report(self, report: ReplicaReport) -> None:
        """A replica says what it holds and how loaded it is."""
        await self._actor.call(PlacementService.report, report, self._store)

    async def gone(self, replica_id: str) -> None:
        """A replica is not to be used for now."""
        await self._actor.call(PlacementService.gone, replica_id)

    async def assign(self, digests: Sequence[str]) -> tuple[Version, PlacementTable]:
        """Give these adapters homes; the table afterwards. Raises NotReady just after placement's restart."""
        return await self._actor.call(PlacementService.assign, digests)

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, PlacementTable] | None:
        """The table, as soon as it differs from `held`; None after `timeout_s`."""
        return await self._actor.call(PlacementService.watch, held, watcher_id, timeout_s)
