"""Placement over time: the books, a clock, and the traffic shares of the adapter store.

In: reports of replicas, questions of ingresses, the shares that the store publishes. Out: the placement table,
published to whoever watches. After a restart it gives no homes, and replaces no table that somebody holds, until every
replica had the time to report: ingresses keep the last table, which is better than one without the replicas that hold
their adapters' rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from app.config import PlacementConfig
from app.deployments.links.published import Published, Version
from app.deployments.links.tasks import Tasks
from app.deployments.links.watched import Follower, Watch
from app.deployments.placement.books import PlacementBooks
from app.deployments.placement.policies.choosing import make_policy
from app.deployments.placement.table import PlacementTable, ReplicaReport
from app.deployments.registry.shares import Shares
from app.engine.errors import NotReady

REBALANCE_INTERVAL_S = 1.0
#: By this much later than a report interval after placement's restart every replica has reported.
SETTLE_MARGIN_S = 0.5


class PlacementService:
    """One event loop. `called` is called whenever a process reports or watches; `clock` gives seconds.

    `watch_shares` gives the call that waits for the shares of a store, by the store's name.
    """

    def __init__(
        self,
        config: PlacementConfig,
        watch_shares: Callable[[str], Watch[Shares]],
        called: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch_shares = watch_shares
        self._called = called
        self._now_s = clock
        self._books = PlacementBooks(make_policy(config), config.silence_s)
        self._published = Published(PlacementTable(), clock)
        self._settled_s = clock() + config.report_interval_s + SETTLE_MARGIN_S
        self._tasks = Tasks()
        self._stores: dict[str, str] = {}  # replica -> the name of the store that it works with
        self._followed: tuple[str, asyncio.Task[None]] | None = None

    async def report(self, report: ReplicaReport, store: str) -> None:
        """A replica says what it holds, how loaded it is, and the name of the store that it works with."""
        self._be_called()
        self._stores[report.replica_id] = store
        self._publish_if(self._books.report(report, self._now_s()))
        self._follow_shares()

    async def gone(self, replica_id: str) -> None:
        """A replica is not to be used for now."""
        self._publish_if(self._books.gone(replica_id, self._now_s()))

    async def assign(self, digests: Sequence[str]) -> tuple[Version, PlacementTable]:
        """Raises NotReady while replicas may be missing: a home that is given then is a wrong one."""
        if self._now_s() < self._settled_s:
            raise NotReady("placement has just started", retry_after_s=1)
        self._publish_if(self._books.assign(digests))
        return self._published.current

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, PlacementTable] | None:
        """The table as soon as it differs from `held`, None after `timeout_s`."""
        self._be_called()
        if held is not None and held.epoch != self._published.current[0].epoch:  # it has a table, of an earlier life
            await asyncio.sleep(self._settled_s - self._now_s())
        return await self._published.newer(held, watcher_id, timeout_s)

    async def close(self) -> None:
        """Stop the clock, and stop following shares."""
        await self._tasks.close()

    def _be_called(self) -> None:
        self._called()
        if not self._tasks:
            self._tasks.run_forever(self._run_clock)

    def _publish_if(self, changed: bool) -> None:
        if changed:
            self._published.publish(self._books.table)

    async def _run_clock(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            now_s = self._now_s()
            changed = self._books.expire(now_s) | self._books.rebalance(now_s)
            self._publish_if(changed or self._books.table != self._published.current[1])
            self._follow_shares()

    def _follow_shares(self) -> None:
        """Follow the store that the replicas work with.

        During an upgrade they work with two: the one that is followed is until no replica works with it.
        """
        present = self._books.table.replicas
        self._stores = {replica_id: store for replica_id, store in self._stores.items() if replica_id in present}
        stores = set(self._stores.values())
        if not stores or (self._followed is not None and self._followed[0] in stores):
            return
        if self._followed is not None:
            self._followed[1].cancel()
        store = min(stores)
        follower = _SharesFollower(self._watch_shares(store), "placement", self._steer)
        self._followed = store, self._tasks.start(follower.follow())

    def _steer(self, shares: Shares) -> None:
        self._publish_if(self._books.steer(shares))


class _SharesFollower(Follower[Shares]):
    def __init__(self, watch: Watch[Shares], watcher_id: str, steer: Callable[[Shares], None]) -> None:
        super().__init__(watch, watcher_id)
        self._steer = steer

    def _take(self, version: Version, news: Shares) -> None:
        self._held = version
        self._steer(news)
