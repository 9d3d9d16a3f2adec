"""Placement over time: the state, a clock, and the traffic shares of the adapter store.

Publishes two tables, of where adapters are and of how loaded replicas are. After a restart it assigns nothing, and
sends no table to a watcher that has one, until every replica had time to report: the last table is better than one that
lacks the replicas with the adapters' rows. The cost of a call or a publication does not depend on the size of the
fleet.
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
    ScalingDecision,
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
#: This long after the first report interval since a restart, every replica has reported.
SETTLE_MARGIN_S = 0.5
#: Shortest time between two updates of an ingress's tables of adapters and of loads.
TABLE_FLOOR_S, LOADS_FLOOR_S = 0.1, 0.25
#: Autoscaling decisions that are kept, the newest of all deployments.
MAX_SCALING_DECISIONS = 100

#: Changed traffic shares, by digest.
TrafficShareChanges = Changes[str, float]


class PlacementService:
    """One event loop. `called` runs whenever a process reports or watches; `clock` gives seconds.

    `watch_traffic_shares` gives the long poll of a store's traffic shares, by the store's name.
    """

    def __init__(
        self,
        config: PlacementConfig,
        watch_traffic_shares: Callable[[str], Watch[TrafficShareChanges]],
        called: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._watch_traffic_shares = watch_traffic_shares
        self._called = called
        self._now_s = clock
        self._settings = config.model_dump_json()
        self._state = _new_state(config)
        self._served = CrossReplicaService()
        self._table: LongPollTable[Key, Row] = LongPollTable(clock, floor_s=TABLE_FLOOR_S)
        self._loads: LongPollTable[str, ReplicaLoad] = LongPollTable(clock, floor_s=LOADS_FLOOR_S)
        self._settled_s = clock() + config.report_interval_s + SETTLE_MARGIN_S
        self._tasks = Tasks()
        self._identities: dict[str, ReplicaIdentity] = {}
        self._followed: tuple[str, asyncio.Task[None]] | None = None
        self._scaling: list[ScalingDecision] = []

    @remote_method
    async def report(self, delta: ReplicaDelta) -> bool:
        """Apply a replica's delta. Returns False if one was missed; the replica must then send a full report."""
        self._on_call()
        now_s = self._now_s()
        is_understood = self._state.report(delta, now_s)
        if delta.replica_id in self._state.view.replicas:
            self._served.ingest(delta)
            if delta.identity is not None:
                self._identities[delta.replica_id] = delta.identity
            if is_understood:
                self._publish_load(delta.replica_id, delta.load, now_s)
        self._publish()
        return is_understood

    @remote_method
    async def report_unreachable(self, ingress_id: str, replica_ids: Sequence[str]) -> None:
        """Record all replicas that an ingress cannot reach. It repeats the call while there are any."""
        self._state.report_unreachable(ingress_id, replica_ids, self._now_s())

    @remote_method
    async def assign(self, digests: Sequence[str]) -> Mapping[str, Row]:
        """The replicas assigned to these adapters; assign some where there are none.

        Raises NotReady while replicas may be missing, because an assignment made then would be a wrong one.
        """
        if self._now_s() < self._settled_s:
            raise NotReady("placement has just started", retry_after_s=1)
        assigned = self._state.assign(digests)
        self._publish()
        return assigned

    @remote_method
    async def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, and how it is used there."""
        return self._state.residency(digest)

    @remote_method
    async def served_elsewhere(self, replica_id: str, tenant_ids: Sequence[str]) -> Mapping[str, float]:
        """Service of these tenants on other replicas than this one, as far as those have reported it."""
        return self._served.elsewhere(replica_id, tenant_ids)

    @remote_method
    async def report_scaling(self, deployment: str, decisions: Sequence[tuple[float, int, int, str, float]]) -> None:
        """Add decisions of the autoscaling policy, which repeats them; each is the fields of a `ScalingDecision` after
        the first."""
        both = {*self._scaling, *(ScalingDecision(deployment, *each) for each in decisions)}
        self._scaling = sorted(both, key=lambda decision: decision.time_s)[-MAX_SCALING_DECISIONS:]

    @remote_method
    async def scaling_decisions(self) -> list[ScalingDecision]:
        """The decisions of the autoscaling policy for all deployments of the application, newest first."""
        return self._scaling[::-1]

    @remote_method
    async def watch(
        self, known: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Row]] | None:
        """Long poll: the next page of rows newer than version `known`; None after `timeout_s`."""
        self._on_call()
        if known is not None and known.epoch != self._table.epoch:  # it has the table of an earlier actor
            await asyncio.sleep(self._settled_s - self._now_s())
        return await self._table.newer(known, watcher_id, timeout_s)

    @remote_method
    async def watch_loads(
        self, known: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, LoadDelta] | None:
        """Long poll: the loads newer than version `known`; None after `timeout_s`."""
        self._on_call()
        update = await self._loads.newer(known, watcher_id, timeout_s)
        return None if update is None else (update[0], LoadDelta(update[1], self._now_s()))

    async def close(self) -> None:
        """Stop the clock and the long poll of traffic shares."""
        await self._tasks.close()

    def _on_call(self) -> None:
        self._called()
        if not self._tasks:
            self._tasks.run_forever(self._run_clock)

    def _publish_load(self, replica_id: str, load: int, now_s: float) -> None:
        """An idle replica that stays idle is not published again: ingresses count their own requests on it either
        way."""
        before = self._loads.get(replica_id)
        if load or before is None or before[0]:
            self._loads.publish({replica_id: (load, now_s)})

    def _publish(self) -> None:
        changes = self._state.take_changes()
        self._table.publish(changes)
        if any(key[0] == "replica" for key in changes):
            present = self._state.view.replicas
            self._identities = {each: identity for each, identity in self._identities.items() if each in present}
            self._served.keep(present)
            self._loads.publish({key[1]: None for key, row in changes.items() if key[0] == "replica" and row is None})
            self._follow_newest()

    async def _run_clock(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            now_s = self._now_s()
            self._state.expire(now_s, self._table.num_watchers)
            self._state.rebalance(now_s)
            self._publish()

    def _follow_newest(self) -> None:
        """Use the settings of the newest replica, and watch the traffic shares of a store that replicas use.

        During an upgrade replicas use two stores; the watched one changes once no replica uses it.
        """
        if not self._identities:
            return
        newest = max(self._identities.values(), key=lambda identity: identity.started_s)
        if newest.settings != self._settings:
            self._settings = newest.settings
            self._configure(newest.settings)
        stores = {identity.store for identity in self._identities.values()}
        if self._followed is not None and self._followed[0] in stores:
            return
        if self._followed is not None:
            self._followed[1].cancel()
            # the other store's shares count from now on
            self._state.set_traffic_shares(dict.fromkeys(self._state.traffic_shares))
        store = min(stores)
        client = _TrafficSharesClient(self._watch_traffic_shares(store), "placement", self._set_traffic_shares)
        self._followed = store, self._tasks.start(client.follow())

    def _configure(self, settings: str) -> None:
        try:
            config = PlacementConfig.model_validate_json(settings)
            policy = make_policy(config)
            self._state.configure(
                policy, config.heartbeat_timeout_s, config.report_interval_s, config.min_replicas_per_adapter
            )
        except (ValueError, ConfigError) as error:  # settings of another version of the code
            logger.error("placement keeps its old settings, the new ones are invalid: %s", error)

    def _set_traffic_shares(self, shares: Mapping[str, float | None]) -> None:
        self._state.set_traffic_shares(shares)
        self._publish()


def _new_state(config: PlacementConfig) -> PlacementState:
    return PlacementState(
        make_policy(config), config.heartbeat_timeout_s, config.report_interval_s, config.min_replicas_per_adapter
    )


class _TrafficSharesClient(LongPollClient[TrafficShareChanges]):
    """Copies a store's table of traffic shares. Another store, or a restarted one, sends a full copy first."""

    def __init__(
        self,
        watch: Watch[TrafficShareChanges],
        watcher_id: str,
        set_shares: Callable[[Mapping[str, float | None]], None],
    ) -> None:
        super().__init__(watch, watcher_id)
        self._set_traffic_shares = set_shares
        self._present: set[str] = set()
        self._sync: TableSync[str, float] = TableSync()

    def _apply(self, update: TrafficShareChanges) -> None:
        changes = self._sync.changes(update, lambda: self._present)
        self._present = {*self._present, *changes} - {digest for digest, share in changes.items() if share is None}
        self._set_traffic_shares(changes)
