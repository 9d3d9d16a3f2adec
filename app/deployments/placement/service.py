"""Placement over time: the books, a clock, and the traffic shares of the adapter store.

In: news of replicas, questions of ingresses, the shares that the store publishes. Out: two published tables, of where
adapters are and of how loaded replicas are. After a restart it gives no homes, and replaces no table that somebody
holds, until every replica had the time to report: ingresses keep the last table, which is better than one without the
replicas that hold their adapters' rows. Rule: what an answer and a publication cost does not depend on the fleet's
size.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from app.config import PlacementConfig
from app.deployments.placement.cross_replica_service import CrossReplicaService
from app.deployments.placement.messages import (
    Key,
    LoadDelta,
    ReplicaDelta,
    ReplicaIdentity,
    ReplicaLoad,
    Residency,
    Row,
)
from app.deployments.placement.replica_choice import make_policy
from app.deployments.placement.state import PlacementState
from app.deployments.rpc.actor_proxy import remote_method
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.long_poll_client import LongPollClient, TableSync, Watch
from app.deployments.rpc.long_poll_host import Changes, LongPollTable, Version
from app.engine.errors import ConfigError, NotReady

logger = logging.getLogger(__name__)

REBALANCE_INTERVAL_S = 1.0
#: By this much later than a report interval after placement's restart every replica has reported.
SETTLE_MARGIN_S = 0.5
#: An ingress is told of adapters and of loads at most this often.
TABLE_FLOOR_S, LOADS_FLOOR_S = 0.1, 0.25

#: Changes of the traffic's shares, by digest.
ShareChanges = Changes[str, float]


class PlacementService:
    """One event loop. `called` is called whenever a process reports or watches; `clock` gives seconds.

    `watch_shares` gives the call that waits for the shares of a store, by the store's name.
    """

    def __init__(
        self,
        config: PlacementConfig,
        watch_shares: Callable[[str], Watch[ShareChanges]],
        called: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._watch_shares = watch_shares
        self._called = called
        self._now_s = clock
        self._settings = config.model_dump_json()
        self._books = _books(config)
        self._served = CrossReplicaService()
        self._table: LongPollTable[Key, Row] = LongPollTable(clock, floor_s=TABLE_FLOOR_S)
        self._loads: LongPollTable[str, ReplicaLoad] = LongPollTable(clock, floor_s=LOADS_FLOOR_S)
        self._settled_s = clock() + config.report_interval_s + SETTLE_MARGIN_S
        self._tasks = Tasks()
        self._origins: dict[str, ReplicaIdentity] = {}
        self._followed: tuple[str, asyncio.Task[None]] | None = None

    @remote_method
    async def report(self, news: ReplicaDelta) -> bool:
        """A replica speaks. False if its news cannot be understood without a whole message, which is wanted then."""
        self._be_called()
        now_s = self._now_s()
        is_understood = self._books.report(news, now_s)
        if news.replica_id in self._books.view.replicas:
            self._served.hear(news)
            if news.origin is not None:
                self._origins[news.replica_id] = news.origin
            if is_understood:
                self._loads.publish({news.replica_id: (news.load, now_s)})
        self._publish()
        return is_understood

    @remote_method
    async def unreached(self, ingress_id: str, replica_ids: Sequence[str]) -> None:
        """An ingress names all replicas that it cannot reach, and does so again while there are any."""
        self._books.unreached(ingress_id, replica_ids, self._now_s())

    @remote_method
    async def assign(self, digests: Sequence[str]) -> Mapping[str, Row]:
        """The homes of these adapters; those without one are given one.

        Raises NotReady while replicas may be missing: a home that is given then is a wrong one.
        """
        if self._now_s() < self._settled_s:
            raise NotReady("placement has just started", retry_after_s=1)
        homes = self._books.assign(digests)
        self._publish()
        return homes

    @remote_method
    async def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, and how it is used there."""
        return self._books.residency(digest)

    @remote_method
    async def served_elsewhere(self, replica_id: str, tenant_ids: Sequence[str]) -> Mapping[str, float]:
        """What these tenants were served on other replicas than this one, as far as those have said."""
        return self._served.elsewhere(replica_id, tenant_ids)

    @remote_method
    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Row]] | None:
        """A page of the table's rows that `get_object` lacks, as soon as there is one; None after `timeout_s`."""
        self._be_called()
        if held is not None and held.epoch != self._table.epoch:  # it has a table, of an earlier life
            await asyncio.sleep(self._settled_s - self._now_s())
        return await self._table.newer(held, watcher_id, timeout_s)

    @remote_method
    async def watch_loads(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, LoadDelta] | None:
        """The loads that `get_object` lacks, as soon as there are some; None after `timeout_s`."""
        self._be_called()
        news = await self._loads.newer(held, watcher_id, timeout_s)
        return None if news is None else (news[0], LoadDelta(news[1], self._now_s()))

    async def close(self) -> None:
        """Stop the clock, and stop following shares."""
        await self._tasks.close()

    def _be_called(self) -> None:
        self._called()
        if not self._tasks:
            self._tasks.run_forever(self._run_clock)

    def _publish(self) -> None:
        changes = self._books.take_changes()
        self._table.publish(changes)
        if any(key[0] == "replica" for key in changes):
            present = self._books.view.replicas
            self._origins = {each: origin for each, origin in self._origins.items() if each in present}
            self._served.keep(present)
            self._loads.publish({key[1]: None for key, row in changes.items() if key[0] == "replica" and row is None})
            self._follow_newest()

    async def _run_clock(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            now_s = self._now_s()
            self._books.expire(now_s, self._table.num_watchers)
            self._books.rebalance(now_s)
            self._publish()

    def _follow_newest(self) -> None:
        """Take the settings of the replica that was started last, and follow a store that replicas work with.

        During an upgrade they work with two: the one that is followed is until no replica works with it.
        """
        if not self._origins:
            return
        newest = max(self._origins.values(), key=lambda origin: origin.started_s)
        if newest.settings != self._settings:
            self._settings = newest.settings
            self._configure(newest.settings)
        stores = {origin.store for origin in self._origins.values()}
        if self._followed is not None and self._followed[0] in stores:
            return
        if self._followed is not None:
            self._followed[1].cancel()
            self._books.steer(dict.fromkeys(self._books.shares))  # the other store says what counts now
        store = min(stores)
        follower = _SharesFollower(self._watch_shares(store), "placement", self._steer)
        self._followed = store, self._tasks.start(follower.follow())

    def _configure(self, settings: str) -> None:
        try:
            config = PlacementConfig.model_validate_json(settings)
            policy = make_policy(config)
            self._books.configure(
                policy, config.heartbeat_timeout_s, config.report_interval_s, config.min_replicas_per_adapter
            )
        except (ValueError, ConfigError) as error:  # of another version of the code
            logger.error("placement goes on with its old settings: %s", error)

    def _steer(self, shares: Mapping[str, float | None]) -> None:
        self._books.steer(shares)
        self._publish()


def _books(config: PlacementConfig) -> PlacementState:
    return PlacementState(
        make_policy(config), config.heartbeat_timeout_s, config.report_interval_s, config.min_replicas_per_adapter
    )


class _SharesFollower(LongPollClient[ShareChanges]):
    """Copies a store's table of shares. Of another store, or another life of it, a whole copy comes first."""

    def __init__(
        self, watch: Watch[ShareChanges], watcher_id: str, steer: Callable[[Mapping[str, float | None]], None]
    ) -> None:
        super().__init__(watch, watcher_id)
        self._steer = steer
        self._present: set[str] = set()
        self._sync: TableSync[str, float] = TableSync()

    def _apply(self, version: Version, news: ShareChanges) -> None:
        self._version = version
        changes = self._sync.changes(news, lambda: self._present)
        self._present = {*self._present, *changes} - {digest for digest, share in changes.items() if share is None}
        self._steer(changes)
