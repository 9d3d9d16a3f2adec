"""What one process knows of placement, and how it asks for homes.

In: adapters that need a home, replicas that cannot be reached. Out: where adapters are, read from this process's
memory. Rule: a placement actor that is away costs freshness, never an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from app.deployments.placement.messages import Key, LoadDelta, ReplicaLoad, Residency, Row
from app.deployments.placement.service import PlacementService
from app.deployments.placement.view import PlacementView
from app.deployments.rpc.background_tasks import LogOnce, wait_for_event
from app.deployments.rpc.long_poll_client import LongPollClient, Watch
from app.deployments.rpc.long_poll_host import Changes, Version

#: Longest wait for placement's answer before the ingress decides by itself.
ASSIGN_TIMEOUT_S = 0.5


class PlacementFeed(LongPollClient[Changes[Key, Row]]):
    """The table, copied by its changes into `view`."""

    def __init__(self, watch: Watch[Changes[Key, Row]], watcher_id: str) -> None:
        super().__init__(watch, watcher_id)
        self._news = asyncio.Event()
        self.view = PlacementView()

    async def changed(self, timeout_s: float) -> None:
        """Wait for news, at most this long."""
        await wait_for_event(self._news, timeout_s)

    def _apply(self, version: Version, news: Changes[Key, Row]) -> None:
        self._version = version
        self.view.take(news)
        self._news.set()
        self._news = asyncio.Event()


class LoadFeed(LongPollClient[LoadDelta]):
    """The loads of replicas, passed to `take` as they come, with placement's time when they were sent."""

    def __init__(
        self,
        watch: Watch[LoadDelta],
        watcher_id: str,
        take: Callable[[Mapping[str, ReplicaLoad | None], float], None],
    ) -> None:
        super().__init__(watch, watcher_id)
        self._take_rows = take

    def _apply(self, version: Version, news: LoadDelta) -> None:
        self._version = version
        self._take_rows(dict(news.changes.rows), news.now_s)


class Placer:
    """What the ingress of this id knows of placement, and how it asks."""

    def __init__(self, placement: PlacementService, watched: PlacementFeed, ingress_id: str) -> None:
        self._placement = placement
        self._watched = watched
        self._ingress_id = ingress_id
        self._troubles = LogOnce("asking placement")

    @property
    def view(self) -> PlacementView:
        """Where adapters are, as far as this process knows."""
        return self._watched.view

    async def assign(self, digests: Sequence[str]) -> None:
        """Find homes for these adapters; returns (not raises) when placement cannot be asked."""
        try:
            async with asyncio.timeout(ASSIGN_TIMEOUT_S):
                self.view.answer(await self._placement.assign(digests))
        except Exception as error:  # away, too late, of another version: the last table decides
            self._troubles.on_error(error)
        else:
            self._troubles.on_recovery()

    async def changed(self, timeout_s: float) -> None:
        """Wait for news of the table, at most this long."""
        await self._watched.changed(timeout_s)

    async def unreached(self, replica_ids: Sequence[str]) -> None:
        """Tell placement all replicas that this process cannot reach now; returns also when placement is away."""
        try:
            await self._placement.unreached(self._ingress_id, replica_ids)
        except Exception as error:  # it will miss the replicas' reports, if they are gone
            self._troubles.on_error(error)

    async def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, and how it is used there. Raises NotReady."""
        return await self._placement.residency(digest)
