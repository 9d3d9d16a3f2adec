"""The placement actor: `PlacementBooks` with a clock, for all ingresses and replicas of one application.

In: reports of replicas, questions of ingresses. Out: the placement table, published to whoever watches, so that no
request waits for this actor. It starts empty after a crash and is right again with the next reports. When nobody
watches any more, it ends (`attendance`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from app.config import AppConfig
from app.deployments.links.attendance import Attendance
from app.deployments.links.published import Published, Version
from app.deployments.links.ray_calls import NamedActor, leave
from app.deployments.placement.books import PlacementBooks
from app.deployments.placement.policies.choosing import make_policy
from app.deployments.placement.table import PlacementTable, ReplicaReport
from app.engine.errors import NotReady

REBALANCE_INTERVAL_S = 1.0
#: By this much later than a report interval after placement's restart every replica has reported.
SETTLE_MARGIN_S = 0.5


class PlacementActor:
    """`PlacementBooks` with a clock.

    After a restart it says nothing until every replica had the time to report: ingresses keep the last table, which
    is better than one without the replicas that hold their adapters' rows.
    """

    def __init__(self, config_json: str) -> None:
        config = AppConfig.model_validate_json(config_json).placement
        self._books = PlacementBooks(make_policy(config), config.silence_s)
        self._published = Published(PlacementTable())
        self._settled_s = time.monotonic() + config.report_interval_s + SETTLE_MARGIN_S
        self._clock: asyncio.Task[None] | None = None
        self._attendance = Attendance(leave)

    async def report(self, report: ReplicaReport) -> None:
        self._attendance.here()
        self._start_clock()
        self._publish_if(self._books.report(report, time.monotonic()))

    async def steer(self, shares: Mapping[str, float]) -> None:
        """What part of the traffic adapters with more than the usual are expected to get; every replica says so."""
        self._publish_if(self._books.steer(shares))

    async def gone(self, replica_id: str) -> None:
        self._publish_if(self._books.gone(replica_id, time.monotonic()))

    async def assign(self, digests: Sequence[str]) -> tuple[Version, PlacementTable]:
        """Raises NotReady while replicas may be missing: a home that is given then is a wrong one."""
        if time.monotonic() < self._settled_s:
            raise NotReady("placement has just started", retry_after_s=1)
        self._publish_if(self._books.assign(digests))
        return self._published.current

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, PlacementTable] | None:
        self._attendance.here()
        self._start_clock()
        if held is not None and held.epoch != self._published.current[0].epoch:  # it has a table, of an earlier life
            await asyncio.sleep(self._settled_s - time.monotonic())
        return await self._published.newer(held, watcher_id, timeout_s)

    async def table(self) -> PlacementTable:
        return self._books.table

    def _publish_if(self, changed: bool) -> None:
        if changed:
            self._published.publish(self._books.table)

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = asyncio.create_task(self._run_clock())

    async def _run_clock(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            now_s = time.monotonic()
            changed = self._books.expire(now_s) | self._books.rebalance(now_s)
            self._publish_if(changed or self._books.table != self._published.current[1])


def placement_actor(config: AppConfig, app_name: str) -> NamedActor:
    """One per application: replicas of two services must not stand on one table."""
    return NamedActor(f"placement-{app_name}-{config.placement_key}", PlacementActor, config.model_dump_json())
