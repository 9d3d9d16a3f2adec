"""An ingress's client of placement: a copy of its tables, and the calls that assign adapters and report failures.

Reads never leave this process. When the placement actor is unavailable, the copy grows stale but still answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from app.deployments.placement.messages import Key, LoadDelta, ReplicaLoad, Residency, Row
from app.deployments.placement.service import PlacementService
from app.deployments.placement.view import PlacementView
from app.deployments.rpc.background_tasks import LogOnce
from app.deployments.rpc.long_poll_client import LongPollClient, Watch
from app.deployments.rpc.long_poll_host import Changes

#: Longest wait for placement's answer before the ingress decides by itself.
ASSIGN_TIMEOUT_S = 0.5


class PlacementTableClient(LongPollClient[Changes[Key, Row]]):
    """The placement table, applied to `view` as it changes."""

    def __init__(self, watch: Watch[Changes[Key, Row]], watcher_id: str) -> None:
        super().__init__(watch, watcher_id)
        self.view = PlacementView()

    def _apply(self, update: Changes[Key, Row]) -> None:
        self.view.take(update)


class LoadTableClient(LongPollClient[LoadDelta]):
    """The loads of replicas, passed to `take` as they arrive, with placement's time when they were sent."""

    def __init__(
        self,
        watch: Watch[LoadDelta],
        watcher_id: str,
        take: Callable[[Mapping[str, ReplicaLoad | None], float], None],
    ) -> None:
        super().__init__(watch, watcher_id)
        self._take_rows = take

    def _apply(self, update: LoadDelta) -> None:
        self._take_rows(dict(update.changes.rows), update.now_s)


class Placer:
    """The placement client of one ingress."""

    def __init__(self, placement: PlacementService, table: PlacementTableClient, ingress_id: str) -> None:
        self._placement = placement
        self._table = table
        self._ingress_id = ingress_id
        self._log = LogOnce("asking placement")

    @property
    def view(self) -> PlacementView:
        """Where adapters are, as far as this process knows."""
        return self._table.view

    async def assign(self, digests: Sequence[str]) -> None:
        """Have replicas assigned to these adapters; returns (does not raise) when placement is unavailable."""
        try:
            async with asyncio.timeout(ASSIGN_TIMEOUT_S):
                self.view.add_pending(await self._placement.assign(digests))
        except Exception as error:  # unavailable, too late or of another version: use the last table
            self._log.on_error(error)
        else:
            self._log.on_recovery()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait for a change of the table, at most this long."""
        await self._table.wait_for_change(timeout_s)

    async def report_unreachable(self, replica_ids: Sequence[str]) -> None:
        """Report all replicas that this process cannot reach now; returns also when placement is unavailable."""
        try:
            await self._placement.report_unreachable(self._ingress_id, replica_ids)
        except Exception as error:  # it notices dead replicas by their missing reports
            self._log.on_error(error)

    async def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, and how it is used there. Raises NotReady."""
        return await self._placement.residency(digest)
