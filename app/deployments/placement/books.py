"""Which replica serves which adapter: the books and the policies, without Ray.

In: reports from replicas (who is alive, how loaded, which adapters are resident), questions about
adapters that have no home yet. Out: a `PlacementTable` that every ingress holds and reads without
asking anybody. An adapter's home changes only when its replica is gone or when sharing it pays:
adding a replica moves nothing, losing one moves its own adapters only. Rendezvous hashing (Thaler &
Ravishankar 1998) with bounded loads (Mirrokni et al. 2018) makes every process that computes the same
question from the same table reach the same answer, so a lost actor costs no agreement.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from app.config import PlacementConfig

#: Adapters with a remembered home; the longest unused are forgotten (their rows, if any, are reported anyway).
MAX_HOMES = 8192
#: A replica shares its busiest adapter when it carries this many times the mean load, and this many more requests.
SHARE_FACTOR, SHARE_MARGIN = 1.5, 4
#: Seconds between two changes of one adapter's homes: the hysteresis.
DWELL_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says about itself. `active` counts requests in the engine by adapter digest.

    `last_used_s`: when a request last entered with each of the resident (Unix time); absent if none did.
    """

    replica_id: str
    num_running: int = 0
    num_waiting: int = 0
    resident: tuple[str, ...] = ()
    active: Mapping[str, int] = field(default_factory=dict)
    last_used_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """What the ingresses hold. `homes` maps an adapter digest to the replicas that serve it, oldest first."""

    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_resident(self, digest: str) -> bool:
        """Whether the adapter was on any replica's device when it last said so."""
        return any(digest in report.resident for report in self.replicas.values())


class PlacementPolicy(Protocol):
    """Where an adapter may be served. An empty answer means anywhere; without `has_homes` it is always empty."""

    has_homes: bool

    def homes(self, digest: str, table: PlacementTable) -> tuple[str, ...]: ...


class StickyPolicy:
    """An adapter goes where its rows are, else to its rendezvous replica with room under the bound."""

    has_homes = True

    def __init__(self, load_bound: float) -> None:
        self._load_bound = load_bound

    def homes(self, digest: str, table: PlacementTable) -> tuple[str, ...]:
        if not table.replicas:
            return ()
        resident = [report.replica_id for report in table.replicas.values() if digest in report.resident]
        if resident:
            return (rendezvous_order(digest, resident)[0],)
        counts = dict.fromkeys(table.replicas, 0)
        for homes in table.homes.values():
            for replica_id in homes:
                if replica_id in counts:
                    counts[replica_id] += 1
        capacity = math.ceil(self._load_bound * (sum(counts.values()) + 1) / len(counts))
        ranked = rendezvous_order(digest, counts)
        return (next(replica_id for replica_id in ranked if counts[replica_id] < capacity),)


class LeastLoadedPolicy:
    """Adapters are ignored: every request goes to the replica with the least work."""

    has_homes = False

    def homes(self, digest: str, table: PlacementTable) -> tuple[str, ...]:  # noqa: ARG002
        return ()


def make_policy(config: PlacementConfig) -> PlacementPolicy:
    return StickyPolicy(config.load_bound) if config.policy == "sticky" else LeastLoadedPolicy()


def rendezvous_order(digest: str, replica_ids: Iterable[str]) -> list[str]:
    """Replicas by falling score H(digest, replica): each adapter has its own order, the same everywhere."""

    def score(replica_id: str) -> bytes:
        return hashlib.blake2b(f"{digest}\0{replica_id}".encode(), digest_size=8).digest()

    return sorted(replica_ids, key=score, reverse=True)


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


def choose_replica(
    digest: str | None, table: PlacementTable, loads: Mapping[str, int], policy: PlacementPolicy
) -> str | None:
    """The replica for one request: the least loaded of its adapter's homes, of all for the base.

    `loads` has one entry per usable replica. A home that is not usable counts as lost: then the policy
    is asked with the table as it is. None when no replica is usable.
    """
    if not loads:
        return None
    candidates = [home for home in table.homes.get(digest, ()) if home in loads] if digest else []
    if digest and not candidates:
        usable = PlacementTable({r: s for r, s in table.replicas.items() if r in loads}, table.homes)
        candidates = list(policy.homes(digest, usable))
    return min(candidates or loads, key=lambda replica_id: (loads[replica_id], replica_id))
