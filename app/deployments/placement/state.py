"""Which replica serves which adapter: the books of the placement actor, without Ray.

In: news from replicas (who is alive, how loaded, which adapters are resident), questions about adapters that have no
home yet, what ingresses cannot reach. Out: the changes of a table that every ingress holds and reads without asking
anybody. An adapter's home changes only when its replica is gone or when sharing it pays: adding a replica moves
nothing, losing one moves its own adapters only. Where a new adapter goes is the policy's decision (`policies/`). Rule:
a replica leaves the table by its own word, by its silence, or when most ingresses, and two at least, cannot reach it.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from app.deployments.placement.messages import Key, ReplicaDelta, Residency, Row
from app.deployments.placement.policy import BatchPlacementPolicy, PlacementPolicy
from app.deployments.placement.reachability import ReachabilityVotes
from app.deployments.placement.view import PlacementView, UsableFleet

logger = logging.getLogger(__name__)

#: Adapters with a remembered home; the longest unused are forgotten (their rows, if any, are reported anyway).
MAX_HOMES = 32_768
#: A replica shares its busiest adapter when it carries this many times the mean load, and this many more requests.
SHARE_FACTOR, SHARE_MARGIN = 1.5, 4
#: Replicas that share an adapter at once, the most loaded ones: the others follow a second later.
MAX_SHARED = 32
#: So many replicas with little to do are looked at beside those that are needed, for room in their rank rows.
NUM_COMPARED = 16
#: A replica has to carry too much for so long before it shares with one whose rank rows are all spoken for.
PATIENCE_S = 2.0
#: Seconds between two changes of one adapter's homes, the hysteresis; but one whose requests fill so many times its
#: homes gets more at once.
DWELL_S = 10.0
OUTGROWN = 2
#: Missed reports after which one ingress that cannot reach a replica is believed.
MISSED_REPORTS = 2.5
#: What a replica carried so long ago counts a third of what it carries now, in the mean of its requests.
TRAFFIC_S = 60.0


@dataclass(slots=True)
class _Replica:
    """What one replica has said."""

    number: int
    seen_s: float
    started_s: float = 0.0
    load: int = 0
    traffic: float = 0.0
    resident: set[str] = field(default_factory=set)
    active: Mapping[str, int] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)
    heads: set[bytes] = field(default_factory=set)


class PlacementState:
    """The placement actor's state. What its methods change is in `take_changes`; times are the caller's, in seconds."""

    def __init__(
        self,
        policy: PlacementPolicy,
        heartbeat_timeout_s: float,
        report_interval_s: float,
        min_replicas_per_adapter: int = 1,
    ) -> None:
        self.view = PlacementView()
        self._changes: dict[Key, Row | None] = {}
        self._replicas: dict[str, _Replica] = {}
        self._used: dict[str, None] = {}  # adapters with a home, by last use
        self._shared: set[str] = set()  # those that have several
        self._peaks: dict[str, float] = {}  # of those the most requests lately
        self._rebalanced_s = 0.0
        self._changed_s: dict[str, float] = {}  # adapters whose homes dwell, and since when
        self._overloaded_s: dict[str, float] = {}  # replicas that carry too much, and since when
        self._kept_out_s: dict[str, float] = {}  # replicas that most could not reach, and when
        self._witnesses = ReachabilityVotes()
        self._shares: dict[str, float] = {}
        self._min_replicas_per_adapter = 1
        self.configure(policy, heartbeat_timeout_s, report_interval_s, min_replicas_per_adapter)

    def configure(
        self,
        policy: PlacementPolicy,
        heartbeat_timeout_s: float,
        report_interval_s: float,
        min_replicas_per_adapter: int = 1,
    ) -> None:
        """Go on with other settings; homes stay, and more are added if `min_replicas_per_adapter` asks for them."""
        self._policy = policy
        self._places_many = policy if isinstance(policy, BatchPlacementPolicy) else None
        self._min_replicas_per_adapter = min_replicas_per_adapter
        self._widen_all(self._used)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._missed_s = MISSED_REPORTS * report_interval_s

    @property
    def shares(self) -> Collection[str]:
        """Adapters that more than the usual part of the traffic is expected for."""
        return self._shares.keys()

    def take_changes(self) -> Mapping[Key, Row | None]:
        """The rows of the table that have changed since this was last asked."""
        changes, self._changes = self._changes, {}
        return changes

    def report(self, news: ReplicaDelta, now_s: float) -> bool:
        """A replica speaks. False if its news cannot be understood without a whole message, which is wanted then."""
        replica_id = news.replica_id
        if now_s - self._kept_out_s.get(replica_id, -math.inf) <= self._heartbeat_timeout_s:
            return True
        if news.is_leaving:
            self._forget(replica_id)
            return True
        replica = self._replicas.get(replica_id)
        if replica is not None and news.number <= replica.number:
            return True  # it was overtaken by a later one
        if news.is_whole:
            replica = replica or self._begin(replica_id, news, now_s)
        elif replica is None or news.number != replica.number + 1:
            return False
        replica.traffic += (news.load - replica.traffic) * -math.expm1((replica.seen_s - now_s) / TRAFFIC_S)
        replica.number, replica.seen_s, replica.load, replica.active = news.number, now_s, news.load, news.active
        self._move(replica_id, replica, news)
        self._note_heads(replica_id, replica, news)
        for digest in news.active:
            if digest in self._used:
                self._used[digest] = self._used.pop(digest)
        return True

    def unreached(self, ingress_id: str, replica_ids: Collection[str], now_s: float) -> None:
        """An ingress names all replicas that it cannot reach; `expire` says what comes of it."""
        self._witnesses.say(ingress_id, [each for each in replica_ids if each in self._replicas], now_s)

    def expire(self, now_s: float, num_ingresses: int) -> None:
        """Drop replicas that have been silent for too long, or that most of this many ingresses cannot reach."""
        self._kept_out_s = {
            each: at_s for each, at_s in self._kept_out_s.items() if now_s - at_s <= self._heartbeat_timeout_s
        }
        for replica_id, replica in list(self._replicas.items()):
            silent_s, is_doubted = now_s - replica.seen_s, self._witnesses.num(replica_id, now_s) > 0
            if silent_s > self._heartbeat_timeout_s or (is_doubted and silent_s > self._missed_s):
                self._forget(replica_id)
            elif self._witnesses.is_out_of_reach(replica_id, now_s, num_ingresses):
                self._kept_out_s[replica_id] = now_s
                self._forget(replica_id)

    def assign(self, digests: Iterable[str]) -> dict[str, Row]:
        """Give every adapter that has no home one, by the policy. Returns the homes of those that have one now."""
        fleet = UsableFleet(self.view, self.view.replicas, self._load, self._traffic)
        digests, homes = list(digests), dict[str, Row]()
        together: Mapping[str, Row] = {}
        if self._places_many is not None:
            homeless = [digest for digest in dict.fromkeys(digests) if not self.view.homes(digest)]
            together = self._places_many.homes_of_all(homeless, fleet) if homeless else {}
        for digest in digests:
            if not self.view.homes(digest):
                chosen = together.get(digest, ()) if self._places_many else self._policy.homes(digest, fleet)
                if chosen:
                    self._set_homes(digest, chosen)
                    self._widen(digest)
            if row := self.view.homes(digest):
                homes[digest] = row
        while len(self._used) > MAX_HOMES:
            self._set_homes(next(iter(self._used)), ())
        return homes

    def steer(self, shares: Mapping[str, float | None]) -> None:
        """The expected parts of the traffic that have changed (None: no more than usual).

        An adapter with a part has that part of the replicas for homes, before the load shows it.
        """
        for digest, share in shares.items():
            if share is None:
                self._shares.pop(digest, None)
            else:
                self._shares[digest] = share
        self._widen_all(self._shares)

    def rebalance(self, now_s: float) -> None:
        """Share the busiest adapter of an overloaded replica; take the extra home back when demand is gone."""
        self._changed_s = {digest: at_s for digest, at_s in self._changed_s.items() if now_s - at_s < DWELL_S}
        self._widen_all(self._shares)
        self._share(now_s)
        self._unshare(now_s)

    def residency(self, digest: str) -> list[Residency]:
        """The replicas whose device holds an adapter, in order of their ids, and how it is used there."""
        holders = sorted(each for each in self.view.holders(digest) if each in self._replicas)
        found = [(each, self._replicas[each]) for each in holders]
        return [Residency(each, replica.active.get(digest, 0), replica.used_s.get(digest)) for each, replica in found]

    def _begin(self, replica_id: str, news: ReplicaDelta, now_s: float) -> _Replica:
        started_s = news.origin.started_s if news.origin is not None else 0.0
        row = (repr(started_s), str(news.num_rank_rows), str(news.num_kv_tokens))
        self._change(("replica", replica_id), row)
        replica = self._replicas[replica_id] = _Replica(news.number, now_s, started_s, traffic=news.load)
        if len(self._replicas) <= self._min_replicas_per_adapter:
            self._widen_all(self._used)  # there were too few replicas for all homes
        return replica

    def _move(self, replica_id: str, replica: _Replica, news: ReplicaDelta) -> None:
        """Take over which adapters came to and left a replica's device."""
        unloaded = replica.resident.difference(news.loaded) if news.is_whole else set(news.unloaded)
        for digest in unloaded & replica.resident:
            self._change(("resident", digest, replica_id), None)
        for digest in news.loaded:
            if digest not in replica.resident:
                row = (str(news.num_rows[digest]),) if digest in news.num_rows else ()
                self._change(("resident", digest, replica_id), row)
        replica.resident = (replica.resident - unloaded).union(news.loaded)
        replica.used_s.update(news.used_s)
        if unloaded:
            replica.used_s = {each: at_s for each, at_s in replica.used_s.items() if each in replica.resident}

    def _note_heads(self, replica_id: str, replica: _Replica, news: ReplicaDelta) -> None:
        """Take over what a replica has cached of what prompts begin with."""
        heads = set() if news.is_whole else replica.heads.difference(news.dropped_heads)
        heads.update(news.cached_prefixes)
        if heads != replica.heads:
            replica.heads = heads
            self._change(("heads", replica_id), tuple(sorted(head.hex() for head in heads)) or None)

    def _load(self, replica_id: str) -> int:
        return self._replicas[replica_id].load

    def _traffic(self, replica_id: str) -> float:
        return self._replicas[replica_id].traffic

    def _num_expected(self, digest: str) -> int:
        return max(self._min_replicas_per_adapter, round(self._shares.get(digest, 0.0) * len(self._replicas)))

    def _widen_all(self, digests: Iterable[str]) -> None:
        for digest in [*digests]:
            if self.view.homes(digest):
                self._widen(digest)

    def _widen(self, digest: str) -> None:
        """Add the homes that an adapter's share and `min_replicas_per_adapter` ask for, in its own order."""
        homes = self.view.homes(digest)
        num_missing = self._num_expected(digest) - len(homes)
        if num_missing > 0:
            others = [other for other in self.view.preferred(digest) if other not in homes]
            self._set_homes(digest, (*homes, *others[:num_missing]))

    def _share(self, now_s: float) -> None:
        if len(self._replicas) < 2:
            return
        loads: dict[str, float] = {each: replica.load for each, replica in self._replicas.items()}
        mean = sum(loads.values()) / len(loads)
        bound = max(SHARE_FACTOR * mean, mean + SHARE_MARGIN)
        overloaded = [each for each, load in loads.items() if load > bound]
        self._overloaded_s = {each: self._overloaded_s.get(each, now_s) for each in overloaded}
        for replica_id in heapq.nsmallest(MAX_SHARED, overloaded, lambda each: (-loads[each], each)):
            active = self._replicas[replica_id].active
            for digest in sorted(active, key=lambda digest: -active[digest]):
                homes = self.view.homes(digest)
                is_due = digest not in self._changed_s or self._has_outgrown(digest, bound)
                if replica_id in homes and len(homes) < len(self._replicas) and is_due:
                    is_patient = now_s - self._overloaded_s[replica_id] < PATIENCE_S
                    if self._add_homes(digest, loads, bound, mean, with_room=is_patient):
                        self._changed_s[digest] = now_s
                    break

    def _add_homes(self, digest: str, loads: dict[str, float], bound: float, mean: float, *, with_room: bool) -> bool:
        """As many homes more as its requests would fill to the bound, one at least, where there is little to do.

        `with_room`: only where its rows have room; False if that is nowhere. Of those replicas the ones that were
        started last: Serve stops them first, and what is lost then is a copy. `loads` are those that are expected after
        what was shared before; what comes of this is added.
        """
        homes = self.view.homes(digest)
        num_active = self._num_active(homes, digest)
        others = [other for other in loads if other not in homes]
        num_more = min(max(math.ceil(num_active / bound) - len(homes), 1), len(others))
        little = (min(loads[other] for other in others) + mean) / 2
        nearest = heapq.nsmallest(
            num_more + NUM_COMPARED,
            others,
            lambda other: (loads[other] > little, -self._replicas[other].started_s, loads[other], other),
        )
        # Room in the rows first: an adapter that drives another one out makes two of them wait.
        nearest.sort(key=lambda other: (loads[other] > bound, self._is_full(other, digest), loads[other] > little))
        more = [other for other in nearest[:num_more] if not (with_room and self._is_full(other, digest))]
        if not more:
            return False
        for other in more:
            loads[other] += num_active / (len(homes) + num_more)
        self._set_homes(digest, (*homes, *more))
        logger.info(
            "adapter %s is served by %s, too: %s have %d requests for it, a replica %.1f for all",
            digest[:12], ", ".join(more), ", ".join(homes), num_active, mean,
        )  # fmt: skip
        return True

    def _has_outgrown(self, digest: str, bound: float) -> bool:
        """Whether an adapter's requests fill twice its homes: it had them before all of the demand was told."""
        homes = self.view.homes(digest)
        return math.ceil(self._num_active(homes, digest) / bound) >= OUTGROWN * len(homes)

    def _is_full(self, replica_id: str, digest: str) -> bool:
        """Whether the adapters at home there leave one more no rank rows, as far as that is known."""
        fleet = UsableFleet(self.view, self.view.replicas, self._load)
        return 0 < fleet.num_rank_rows(replica_id) < fleet.num_rows_at(replica_id) + fleet.num_rows(digest)

    def _num_active(self, homes: Row, digest: str) -> int:
        return sum(self._replicas[home].active.get(digest, 0) for home in homes if home in self._replicas)

    def _unshare(self, now_s: float) -> None:
        """Take half of an adapter's homes back where the others would do, for the most that was lately, too.

        What was counts less the longer ago it is: load that comes and goes keeps its homes.
        """
        left = math.exp((self._rebalanced_s - now_s) / TRAFFIC_S)
        self._rebalanced_s = now_s
        self._peaks = {
            digest: max(self._num_active(self.view.homes(digest), digest), left * self._peaks.get(digest, 0.0))
            for digest in self._shared
        }
        for digest in sorted(self._shared.difference(self._changed_s)):
            homes = self.view.homes(digest)
            if len(homes) > self._num_expected(digest):
                num_kept = max(self._num_expected(digest), len(homes) // 2)
                if self._peaks[digest] < SHARE_MARGIN / 2 * num_kept:
                    self._set_homes(digest, homes[:num_kept])
                    self._changed_s[digest] = now_s
                    logger.info(
                        "adapter %s is no longer served by %s: its %d homes had %.1f requests lately",
                        digest[:12], ", ".join(homes[num_kept:]), len(homes), self._peaks[digest],
                    )  # fmt: skip

    def _forget(self, replica_id: str) -> None:
        """Take a replica off the table, and its homes; adapters without another home have none."""
        self._witnesses.forget(replica_id)
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        self._change(("replica", replica_id), None)
        if replica.heads:
            self._change(("heads", replica_id), None)
        for digest in replica.resident:
            self._change(("resident", digest, replica_id), None)
        for digest in list(self.view.at_home(replica_id)):
            self._set_homes(digest, tuple(home for home in self.view.homes(digest) if home != replica_id))
            if self.view.homes(digest):
                self._widen(digest)

    def _set_homes(self, digest: str, homes: Row) -> None:
        homes = tuple(sorted(homes, key=lambda home: self._replicas[home].started_s))
        self._change(("home", digest), homes or None)
        self._shared.discard(digest)
        if homes:
            self._used.setdefault(digest)
        else:
            self._used.pop(digest, None)
        if len(homes) > 1:
            self._shared.add(digest)

    def _change(self, key: Key, row: Row | None) -> None:
        self._changes[key] = row
        self.view.apply({key: row})
