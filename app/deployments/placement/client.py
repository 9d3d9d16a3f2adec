"""How ingresses and replicas ask placement: a typed method per call.

In: the placement actor. Out: what `PlacementService` answers, or the exception that it raised. mypy checks each call
against the service's method of the same name. All of them raise ActorAway (a NotReady) while placement restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.deployments.links.published import Changes, Version
from app.deployments.links.ray_calls import Callee
from app.deployments.placement.service import PlacementService
from app.deployments.placement.table import Key, LoadNews, ReplicaNews, Residency, Row


class PlacementClient:
    """Several may share an actor."""

    def __init__(self, actor: Callee) -> None:
        self._actor = actor

    async def report(self, news: ReplicaNews) -> bool:
        """A replica says what has changed; False: placement wants to hear the whole."""
        return await self._actor.call(PlacementService.report, news)

    async def unreached(self, ingress_id: str, replica_ids: Sequence[str]) -> None:
        """An ingress names all replicas that it cannot reach."""
        await self._actor.call(PlacementService.unreached, ingress_id, replica_ids)

    async def assign(self, digests: Sequence[str]) -> Mapping[str, Row]:
        """The homes of these adapters, given now where there were none. Raises NotReady just after its restart."""
        return await self._actor.call(PlacementService.assign, digests)

    async def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, and how it is used there."""
        return await self._actor.call(PlacementService.residency, digest)

    async def served_elsewhere(self, replica_id: str, tenant_ids: Sequence[str]) -> Mapping[str, float]:
        """What these tenants were served on other replicas than this one, as far as those have said."""
        return await self._actor.call(PlacementService.served_elsewhere, replica_id, tenant_ids)

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Row]] | None:
        """A page of the table's rows that `held` lacks, as soon as there is one; None after `timeout_s`."""
        return await self._actor.call(PlacementService.watch, held, watcher_id, timeout_s)

    async def watch_loads(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, LoadNews] | None:
        """The loads that `held` lacks, as soon as there are some; None after `timeout_s`."""
        return await self._actor.call(PlacementService.watch_loads, held, watcher_id, timeout_s)
