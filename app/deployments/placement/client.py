"""How ingresses and replicas ask placement: a typed method per call.

In: the placement actor. Out: what `PlacementActor` answers, or the exception that it raised. Every method has the name
and the signature of the actor's; mypy checks each call against it. All of them raise ActorAway (a NotReady) while
placement restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.deployments.links.published import Version
from app.deployments.links.ray_calls import Callee
from app.deployments.placement.actor import PlacementActor
from app.deployments.placement.table import PlacementTable, ReplicaReport


class PlacementClient:
    """Several may share an actor."""

    def __init__(self, actor: Callee) -> None:
        self._actor = actor

    async def report(self, report: ReplicaReport) -> None:
        """A replica says what it holds and how loaded it is."""
        await self._actor.call(PlacementActor.report, report)

    async def steer(self, shares: Mapping[str, float]) -> None:
        """Digests and the part of the traffic that is expected for them."""
        await self._actor.call(PlacementActor.steer, shares)

    async def gone(self, replica_id: str) -> None:
        """A replica is not to be used for now."""
        await self._actor.call(PlacementActor.gone, replica_id)

    async def assign(self, digests: Sequence[str]) -> tuple[Version, PlacementTable]:
        """Give these adapters homes; the table afterwards. Raises NotReady just after placement's restart."""
        return await self._actor.call(PlacementActor.assign, digests)

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, PlacementTable] | None:
        """The table, as soon as it differs from `held`; None after `timeout_s`."""
        return await self._actor.call(PlacementActor.watch, held, watcher_id, timeout_s)
