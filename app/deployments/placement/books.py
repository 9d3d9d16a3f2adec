"""Which replica serves which adapter: the books of the placement actor, without Ray.

In: reports from replicas (who is alive, how loaded, which adapters are resident), questions about adapters that
have no home yet. Out: a `PlacementTable` that every ingress holds and reads without asking anybody. An adapter's
home changes only when its replica is gone or when sharing it pays: adding a replica moves nothing, losing one moves
its own adapters only. Where a new adapter goes is the policy's decision (`policies/`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from app.deployments.placement.policies.policy import PlacementPolicy
from app.deployments.placement.rendezvous import rendezvous_order
from app.deployments.placement.table import PlacementTable, ReplicaReport

#: Adapters with a remembered home; the longest unused are forgotten (their rows, if any, are reported anyway).
MAX_HOMES = 8192
#: A replica shares its busiest adapter when it carries this many times the mean load, and this many more requests.
SHARE_FACTOR, SHARE_MARGIN = 1.5, 4
#: Seconds between two changes of one adapter's homes: the hysteresis.
DWELL_S = 10.0


class PlacementBooks:
    """The placement actor's state: reports in, table out. Every method says whether the table changed."""

    def __init__(self, policy: PlacementPolicy, silence_s: float) -> None:
        self._policy = policy
        self._silence_s = silence_s
        self._replicas: dict[str, ReplicaReport] = {}
        self._seen_s: dict[str, float] = {}
        self._homes: dict[str, tuple[str, ...]] = {}
        self._changed_s: dict[str, float] = {}  # adapters whose homes dwell, and since when
        self._gone: dict[str, float] = {}  # replicas that may still speak, and when they were last declared gone
        self._shares: Mapping[str, float] = {}

    @property
    def table(self) -> PlacementTable:
        return PlacementTable(dict(self._replicas), dict(self._homes))

    def report(self, report: ReplicaReport, now_s: float) -> bool:
        """A replica speaks. One that was declared gone is not believed for a while: its last words may still arrive."""
        if now_s - self._gone.get(report.replica_id, -math.inf) <= self._silence_s:
            return False
        self._seen_s[report.replica_id] = now_s
        before = self._replicas.get(report.replica_id)
        self._replicas[report.replica_id] = report
        for digest in report.active.keys() & self._homes.keys():
            self._homes[digest] = self._homes.pop(digest)  # by last use
        return before is None or before.resident != report.resident

    def gone(self, replica_id: str, now_s: float) -> bool:
        """An ingress met a dead or draining replica, or lost its connection to a healthy one: nobody can tell which.

        It is taken back when it still speaks after the time of silence; then whoever meets it again says so again.
        """
        self._seen_s.pop(replica_id, None)
        self._gone[replica_id] = now_s
        return self._forget(replica_id)

    def expire(self, now_s: float) -> bool:
        """Drop replicas that have been silent too long, and forget that they were there."""
        silent = [replica_id for replica_id, seen_s in self._seen_s.items() if now_s - seen_s > self._silence_s]
        for replica_id in silent:
            del self._seen_s[replica_id]
        self._gone = {gone: at_s for gone, at_s in self._gone.items() if now_s - at_s <= self._silence_s}
        forgotten = [self._forget(replica_id) for replica_id in silent]  # all of them: any() would stop early
        return any(forgotten)

    def assign(self, digests: Iterable[str]) -> bool:
        """Give every adapter that has no living home one, by the policy."""
        changed = False
        for digest in digests:
            if digest in self._homes:
                continue
            homes = self._policy.homes(digest, self.table)
            if homes:
                self._homes[digest] = homes
                self._widen(digest)
                changed = True
        while len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        return changed

    def steer(self, shares: Mapping[str, float]) -> bool:
        """Adapters that more than the usual part of the traffic is expected for: each has that part of the replicas
        for homes, before the load shows it.
        """
        self._shares = dict(shares)
        return self._widen_all()

    def rebalance(self, now_s: float) -> bool:
        """Share the busiest adapter of an overloaded replica; take the extra home back when demand is gone."""
        self._changed_s = {digest: at_s for digest, at_s in self._changed_s.items() if now_s - at_s < DWELL_S}
        return self._widen_all() | self._share(now_s) | self._unshare(now_s)

    def _num_expected(self, digest: str) -> int:
        return max(1, round(self._shares.get(digest, 0.0) * len(self._replicas)))

    def _widen_all(self) -> bool:
        widened = [self._widen(digest) for digest in self._shares if digest in self._homes]  # any() would stop early
        return any(widened)

    def _widen(self, digest: str) -> bool:
        """Add the homes that an adapter's share asks for, in its rendezvous order."""
        homes = self._homes[digest]
        others = [other for other in rendezvous_order(digest, self._replicas) if other not in homes]
        added = others[: max(0, self._num_expected(digest) - len(homes))]
        self._homes[digest] = (*homes, *added)
        return bool(added)

    def _share(self, now_s: float) -> bool:
        if len(self._replicas) < 2:
            return False
        mean = sum(report.load for report in self._replicas.values()) / len(self._replicas)
        for report in sorted(self._replicas.values(), key=lambda report: -report.load):
            if report.load <= max(SHARE_FACTOR * mean, mean + SHARE_MARGIN):
                return False
            for digest in sorted(report.active, key=lambda digest: -report.active[digest]):
                homes = self._homes.get(digest)
                others = [other for other in self._replicas.values() if homes and other.replica_id not in homes]
                if homes and report.replica_id in homes and others and digest not in self._changed_s:
                    target = min(others, key=lambda other: (other.load, other.replica_id))
                    self._homes[digest] = (*homes, target.replica_id)
                    self._changed_s[digest] = now_s
                    return True
        return False

    def _unshare(self, now_s: float) -> bool:
        changed = False
        for digest, homes in list(self._homes.items()):
            if len(homes) > self._num_expected(digest) and digest not in self._changed_s:
                active = sum(self._replicas[home].active.get(digest, 0) for home in homes if home in self._replicas)
                if active < SHARE_MARGIN:
                    self._homes[digest] = homes[:-1]
                    self._changed_s[digest] = now_s
                    changed = True
        return changed

    def _forget(self, replica_id: str) -> bool:
        if self._replicas.pop(replica_id, None) is None:
            return False
        for digest, homes in list(self._homes.items()):
            if replica_id in homes:
                rest = tuple(home for home in homes if home != replica_id)
                if rest:
                    self._homes[digest] = rest
                else:
                    del self._homes[digest]
        return True
