"""The state of the placement actor, without Ray: which replica serves which adapter.

It ingests replicas' deltas (load, resident adapters) and ingresses' votes on unreachable replicas, and produces changes
of the table that every ingress copies. An adapter's assignment changes only when its replica is gone or when scaling it
out pays: adding a replica moves nothing, losing one moves its own adapters only. Where a new adapter goes is the
policy's decision (`policies/`). A replica gets no more requests when it drains, when it stops reporting, or when most
ingresses, and at least two, cannot reach it. While it drains, the table has it as draining.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Collection, Iterable, Mapping

from app.deployments.placement.delta_reporter import TRAFFIC_S, ReportedReplica
from app.deployments.placement.messages import DrainingReplica, Key, ReplicaDelta, Residency, Row
from app.deployments.placement.policy import BatchPlacementPolicy, PlacementPolicy
from app.deployments.placement.reachability import ReachabilityVotes
from app.deployments.placement.view import PlacementView, UsableFleet

logger = logging.getLogger(__name__)

#: Adapters with an assignment; beyond that the least recently used are dropped (their rows are reported anyway).
MAX_ASSIGNED = 32_768
#: A replica scales out its busiest adapter when its load is this many times the mean, and this much above it.
OVERLOAD_FACTOR, OVERLOAD_MARGIN = 1.5, 4
#: Replicas that scale out in one pass, the most loaded ones; the others follow a second later.
MAX_SCALED_OUT = 32
#: Idle replicas compared beyond the needed number, to find room in their rank rows.
NUM_COMPARED = 16
#: A replica must be overloaded for this long before it scales out to a replica with full rank rows.
SUSTAINED_OVERLOAD_S = 2.0
#: Hysteresis: seconds between two changes of one adapter's replicas, unless its requests would fill OUTGROWN_FACTOR
#: times as many.
DWELL_S = 10.0
OUTGROWN_FACTOR = 2
#: After this many missed reports the vote of a single ingress is enough to remove a replica.
MISSED_REPORTS = 2.5


class PlacementState:
    """The placement actor's state. Changes accumulate for `take_changes`; times are the caller's, in seconds."""

    def __init__(
        self,
        policy: PlacementPolicy,
        heartbeat_timeout_s: float,
        report_interval_s: float,
        min_replicas_per_adapter: int = 1,
    ) -> None:
        self.view = PlacementView()
        self._changes: dict[Key, Row | None] = {}
        self._replicas: dict[str, ReportedReplica] = {}
        self._used: dict[str, None] = {}  # assigned adapters, least recently used first
        self._replicated: set[str] = set()  # adapters with several replicas
        self._peaks: dict[str, float] = {}  # their recent maximum of requests
        self._rebalanced_s = 0.0
        # digest -> when its replicas last changed; not changed again for DWELL_S
        self._last_change_s: dict[str, float] = {}
        self._overloaded_s: dict[str, float] = {}  # overloaded replicas, and since when
        self._excluded_s: dict[str, float] = {}  # replicas removed as unreachable, and when
        self._draining_s: dict[str, float] = {}  # draining replicas, and their last report
        self._reachability = ReachabilityVotes()
        self._traffic_shares: dict[str, float] = {}
        self._min_replicas_per_adapter = 1
        self.configure(policy, heartbeat_timeout_s, report_interval_s, min_replicas_per_adapter)

    def configure(
        self,
        policy: PlacementPolicy,
        heartbeat_timeout_s: float,
        report_interval_s: float,
        min_replicas_per_adapter: int = 1,
    ) -> None:
        """Apply new settings; assignments stay, and replicas are added if `min_replicas_per_adapter` asks for them."""
        self._policy = policy
        self._batch_policy = policy if isinstance(policy, BatchPlacementPolicy) else None
        self._min_replicas_per_adapter = min_replicas_per_adapter
        self._add_replicas_to_all(self._used)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._missed_s = MISSED_REPORTS * report_interval_s

    @property
    def traffic_shares(self) -> Collection[str]:
        """Adapters with a share of the expected traffic; the others have no more than usual."""
        return self._traffic_shares.keys()

    def take_changes(self) -> Mapping[Key, Row | None]:
        """The rows of the table that changed since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def report(self, delta: ReplicaDelta, now_s: float) -> bool:
        """Apply a replica's delta. Returns False if one was missed; the replica must then send a full report."""
        replica_id = delta.replica_id
        if now_s - self._excluded_s.get(replica_id, -math.inf) <= self._heartbeat_timeout_s:
            return True
        if delta.is_draining:
            self._drain(replica_id, delta.load, now_s)
            return True
        replica = self._replicas.get(replica_id)
        if replica is not None and delta.number <= replica.number:
            return True  # overtaken by a later one
        if delta.is_whole:
            replica = replica or self._add_replica(replica_id, delta, now_s)
        elif replica is None or delta.number != replica.number + 1:
            return False
        for key, row in replica.apply(delta, now_s).items():
            self._change(key, row)
        for digest in delta.active:
            if digest in self._used:
                self._used[digest] = self._used.pop(digest)
        return True

    def report_unreachable(self, ingress_id: str, replica_ids: Collection[str], now_s: float) -> None:
        """Record an ingress's votes on all replicas that it cannot reach; `expire` acts on them."""
        self._reachability.vote(ingress_id, [each for each in replica_ids if each in self._replicas], now_s)

    def expire(self, now_s: float, num_ingresses: int) -> None:
        """Remove replicas that stopped reporting, or that most of `num_ingresses` ingresses cannot reach."""
        self._excluded_s = {
            each: at_s for each, at_s in self._excluded_s.items() if now_s - at_s <= self._heartbeat_timeout_s
        }
        for replica_id, seen_s in list(self._draining_s.items()):
            if now_s - seen_s > self._heartbeat_timeout_s:
                del self._draining_s[replica_id]
                self._change(("draining", replica_id), None)
        for replica_id, replica in list(self._replicas.items()):
            silent_s, is_doubted = now_s - replica.seen_s, self._reachability.num_votes(replica_id, now_s) > 0
            if silent_s > self._heartbeat_timeout_s or (is_doubted and silent_s > self._missed_s):
                self._remove_replica(replica_id)
            elif self._reachability.is_out_of_reach(replica_id, now_s, num_ingresses):
                self._excluded_s[replica_id] = now_s
                self._remove_replica(replica_id)

    def assign(self, digests: Iterable[str]) -> dict[str, Row]:
        """The replicas of these adapters; the policy assigns some to those that have none."""
        fleet = UsableFleet(self.view, self.view.replicas, self._load, self._traffic)
        digests, assigned = list(digests), dict[str, Row]()
        together: Mapping[str, Row] = {}
        if self._batch_policy is not None:
            unassigned = [digest for digest in dict.fromkeys(digests) if not self.view.assigned_replicas(digest)]
            together = self._batch_policy.assign_all(unassigned, fleet) if unassigned else {}
        for digest in digests:
            if not self.view.assigned_replicas(digest):
                chosen = together.get(digest, ()) if self._batch_policy else self._policy.assign(digest, fleet)
                if chosen:
                    self._set_assigned(digest, chosen)
                    self._add_replicas(digest)
            if row := self.view.assigned_replicas(digest):
                assigned[digest] = row
        while len(self._used) > MAX_ASSIGNED:
            self._set_assigned(next(iter(self._used)), ())
        return assigned

    def set_traffic_shares(self, shares: Mapping[str, float | None]) -> None:
        """Update the expected shares of the traffic (None: no more than usual).

        An adapter with a share is assigned that part of the replicas before the load shows it.
        """
        for digest, share in shares.items():
            if share is None:
                self._traffic_shares.pop(digest, None)
            else:
                self._traffic_shares[digest] = share
        self._add_replicas_to_all(self._traffic_shares)

    def rebalance(self, now_s: float) -> None:
        """Scale out the busiest adapter of each overloaded replica; scale in where demand is gone."""
        self._last_change_s = {digest: at_s for digest, at_s in self._last_change_s.items() if now_s - at_s < DWELL_S}
        self._add_replicas_to_all(self._traffic_shares)
        self._scale_out(now_s)
        self._scale_in(now_s)

    def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, ordered by id, and how it is used there."""
        resident_on = sorted(each for each in self.view.resident_replicas(digest) if each in self._replicas)
        found = [(each, self._replicas[each]) for each in resident_on]
        return [Residency(each, replica.active.get(digest, 0), replica.used_s.get(digest)) for each, replica in found]

    def _add_replica(self, replica_id: str, delta: ReplicaDelta, now_s: float) -> ReportedReplica:
        started_s = delta.identity.started_s if delta.identity is not None else 0.0
        row = (repr(started_s), str(delta.num_rank_rows), str(delta.num_kv_tokens))
        self._change(("replica", replica_id), row)
        replica = self._replicas[replica_id] = ReportedReplica(
            replica_id, delta.number, now_s, started_s, traffic=delta.load
        )
        if len(self._replicas) <= self._min_replicas_per_adapter:
            self._add_replicas_to_all(self._used)  # there were too few replicas for the minimum
        return replica

    def _load(self, replica_id: str) -> int:
        return self._replicas[replica_id].load

    def _traffic(self, replica_id: str) -> float:
        return self._replicas[replica_id].traffic

    def _num_desired(self, digest: str) -> int:
        return max(self._min_replicas_per_adapter, round(self._traffic_shares.get(digest, 0.0) * len(self._replicas)))

    def _add_replicas_to_all(self, digests: Iterable[str]) -> None:
        for digest in [*digests]:
            if self.view.assigned_replicas(digest):
                self._add_replicas(digest)

    def _add_replicas(self, digest: str) -> None:
        """Add the replicas that an adapter's share and `min_replicas_per_adapter` ask for, preferred ones first."""
        assigned = self.view.assigned_replicas(digest)
        num_missing = self._num_desired(digest) - len(assigned)
        if num_missing > 0:
            others = [other for other in self.view.preference_order(digest) if other not in assigned]
            self._set_assigned(digest, (*assigned, *others[:num_missing]))

    def _scale_out(self, now_s: float) -> None:
        if len(self._replicas) < 2:
            return
        loads: dict[str, float] = {each: replica.load for each, replica in self._replicas.items()}
        mean = sum(loads.values()) / len(loads)
        bound = max(OVERLOAD_FACTOR * mean, mean + OVERLOAD_MARGIN)
        overloaded = [each for each, load in loads.items() if load > bound]
        self._overloaded_s = {each: self._overloaded_s.get(each, now_s) for each in overloaded}
        for replica_id in heapq.nsmallest(MAX_SCALED_OUT, overloaded, lambda each: (-loads[each], each)):
            active = self._replicas[replica_id].active
            for digest in sorted(active, key=lambda digest: -active[digest]):
                assigned = self.view.assigned_replicas(digest)
                is_due = digest not in self._last_change_s or self._has_outgrown(digest, bound)
                if replica_id in assigned and len(assigned) < len(self._replicas) and is_due:
                    is_recent = now_s - self._overloaded_s[replica_id] < SUSTAINED_OVERLOAD_S
                    if self._assign_more(digest, loads, bound, mean, with_room=is_recent):
                        self._last_change_s[digest] = now_s
                    break

    def _assign_more(self, digest: str, loads: dict[str, float], bound: float, mean: float, *, with_room: bool) -> bool:
        """Assign as many more idle replicas as the adapter's requests would fill to the bound, at least one.

        `with_room`: only where its rank rows have room; returns False if that is nowhere. Among equals the newest
        replicas are taken: Serve stops them first, and then only a copy is lost. `loads` are the loads expected after
        earlier calls; this one adds its own.
        """
        assigned = self.view.assigned_replicas(digest)
        num_active = self._num_active(digest)
        others = [other for other in loads if other not in assigned]
        num_more = min(max(math.ceil(num_active / bound) - len(assigned), 1), len(others))
        little = (min(loads[other] for other in others) + mean) / 2
        nearest = heapq.nsmallest(
            num_more + NUM_COMPARED,
            others,
            lambda other: (loads[other] > little, -self._replicas[other].started_s, loads[other], other),
        )
        # Prefer room in the rank rows: evicting another adapter makes two of them wait.
        nearest.sort(key=lambda other: (loads[other] > bound, self._is_full(other, digest), loads[other] > little))
        more = [other for other in nearest[:num_more] if not (with_room and self._is_full(other, digest))]
        if not more:
            return False
        for other in more:
            loads[other] += num_active / (len(assigned) + num_more)
        self._set_assigned(digest, (*assigned, *more))
        logger.info(
            "adapter %s is now also assigned to %s: %s had %d of its requests, the mean replica load is %.1f",
            digest[:12], ", ".join(more), ", ".join(assigned), num_active, mean,
        )  # fmt: skip
        return True

    def _has_outgrown(self, digest: str, bound: float) -> bool:
        """Whether an adapter's requests fill OUTGROWN_FACTOR times its replicas, which were chosen before all demand
        was known.
        """
        return math.ceil(self._num_active(digest) / bound) >= OUTGROWN_FACTOR * len(self.view.assigned_replicas(digest))

    def _is_full(self, replica_id: str, digest: str) -> bool:
        """Whether the adapters assigned there leave no rank rows for one more, as far as that is known."""
        fleet = UsableFleet(self.view, self.view.replicas, self._load)
        return 0 < fleet.num_rank_rows(replica_id) < fleet.num_rows_at(replica_id) + fleet.num_rows(digest)

    def _num_active(self, digest: str) -> int:
        """Requests for an adapter on the replicas assigned to it."""
        assigned = self.view.assigned_replicas(digest)
        return sum(self._replicas[each].active.get(digest, 0) for each in assigned if each in self._replicas)

    def _scale_in(self, now_s: float) -> None:
        """Take away half of an adapter's replicas where the rest can carry its recent maximum.

        The maximum decays with time, so that load that comes and goes keeps its replicas.
        """
        decay = math.exp((self._rebalanced_s - now_s) / TRAFFIC_S)
        self._rebalanced_s = now_s
        self._peaks = {
            digest: max(self._num_active(digest), decay * self._peaks.get(digest, 0.0)) for digest in self._replicated
        }
        for digest in sorted(self._replicated.difference(self._last_change_s)):
            assigned = self.view.assigned_replicas(digest)
            if len(assigned) > self._num_desired(digest):
                num_remaining = max(self._num_desired(digest), len(assigned) // 2)
                if self._peaks[digest] < OVERLOAD_MARGIN / 2 * num_remaining:
                    self._set_assigned(digest, assigned[:num_remaining])
                    self._last_change_s[digest] = now_s
                    logger.info(
                        "adapter %s is no longer assigned to %s: its %d replicas had %.1f requests lately",
                        digest[:12], ", ".join(assigned[num_remaining:]), len(assigned), self._peaks[digest],
                    )  # fmt: skip

    def _drain(self, replica_id: str, num_requests: int, now_s: float) -> None:
        """Remove a replica that takes no new requests; the table has it as draining until its reports end."""
        before = self._replicas.get(replica_id) or self.view.draining.get(replica_id)
        self._remove_replica(replica_id)
        self._draining_s[replica_id] = now_s
        now = DrainingReplica(0.0 if before is None else before.started_s, num_requests)
        if self.view.draining.get(replica_id) != now:
            self._change(("draining", replica_id), (repr(now.started_s), str(now.num_requests)))

    def _remove_replica(self, replica_id: str) -> None:
        """Remove a replica and its assignments; adapters without another replica have none assigned."""
        self._reachability.remove(replica_id)
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        self._change(("replica", replica_id), None)
        for key in replica.row_keys():
            self._change(key, None)
        for digest in list(self.view.assigned_adapters(replica_id)):
            self._set_assigned(
                digest, tuple(each for each in self.view.assigned_replicas(digest) if each != replica_id)
            )
            if self.view.assigned_replicas(digest):
                self._add_replicas(digest)

    def _set_assigned(self, digest: str, assigned: Row) -> None:
        assigned = tuple(sorted(assigned, key=lambda replica_id: self._replicas[replica_id].started_s))
        self._change(("assigned", digest), assigned or None)
        self._replicated.discard(digest)
        if assigned:
            self._used.setdefault(digest)
        else:
            self._used.pop(digest, None)
        if len(assigned) > 1:
            self._replicated.add(digest)

    def _change(self, key: Key, row: Row | None) -> None:
        self._changes[key] = row
        self.view.apply({key: row})
