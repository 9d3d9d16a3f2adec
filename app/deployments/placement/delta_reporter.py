"""Reports of one replica to placement, as deltas: the replica's side and placement's.

A delta that placement may have missed is followed by a full report, never by another delta.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from app.deployments.placement.messages import Key, ReplicaDelta, ReplicaIdentity, ReplicaReport, Row

#: Time constant of the exponential mean of a replica's requests.
TRAFFIC_S = 60.0
#: Tenants whose service goes into one message, those with the most since the last.
MAX_REPORTED_TENANTS = 64


class DeltaReporter:
    """One per replica. `identity` goes with every full report."""

    def __init__(self, identity: ReplicaIdentity) -> None:
        self._identity = identity
        self._number = 0
        self._last: ReplicaReport | None = None
        self._reported_served: dict[str, float] = {}

    def has_changed(self, resident: tuple[str, ...]) -> bool:
        """Whether the resident adapters differ from the last report."""
        return self._last is None or self._last.resident != resident

    def next_delta(self, state: ReplicaReport, *, is_draining: bool = False) -> ReplicaDelta:
        """The next message. Call `reset` if placement refuses it, so that the next one is a full report."""
        last, self._last = self._last, state
        self._number += 1
        delta = ReplicaDelta(
            state.replica_id,
            self._number,
            state.load,
            is_draining=is_draining,
            active=dict(state.active),
            served=self._service_changes(state),
        )
        if last is None:
            used_s = dict(state.last_used_s)
            return replace(
                delta,
                is_whole=True,
                loaded=state.resident,
                used_s=used_s,
                identity=self._identity,
                num_rows=dict(state.num_rows),
                num_rank_rows=state.num_rank_rows,
                num_kv_tokens=state.num_kv_tokens,
                cached_prefixes=state.cached_prefixes,
            )
        before, now = set(last.resident), set(state.resident)
        return replace(
            delta,
            num_rows={digest: rows for digest, rows in state.num_rows.items() if digest not in before},
            loaded=tuple(sorted(now - before)),
            unloaded=tuple(sorted(before - now)),
            cached_prefixes=tuple(sorted({*state.cached_prefixes}.difference(last.cached_prefixes))),
            dropped_prefixes=tuple(sorted({*last.cached_prefixes}.difference(state.cached_prefixes))),
            used_s={d: used_s for d, used_s in state.last_used_s.items() if last.last_used_s.get(d) != used_s},
        )

    def _service_changes(self, state: ReplicaReport) -> dict[str, float]:
        """Totals that have changed. A lost message is made good by the next, because they are totals."""
        since = {name: total - self._reported_served.get(name, 0.0) for name, total in state.served.items()}
        changed = [name for name, amount in since.items() if amount]
        if len(changed) > MAX_REPORTED_TENANTS:
            changed = heapq.nlargest(MAX_REPORTED_TENANTS, changed, key=since.__getitem__)
        last = {name: state.served[name] for name in changed}
        self._reported_served = {
            name: total for name, total in self._reported_served.items() if name in state.served
        } | last
        return last

    def reset(self) -> None:
        """Make the next message a full report, because placement may have missed one."""
        self._last = None


@dataclass(slots=True)
class ReportedReplica:
    """One replica as its reports describe it to placement, with its rows of the table: resident adapters, prefixes.

    `load`: its requests; `traffic`: their exponential mean. Times are placement's, in seconds, except `started_s` and
    `used_s`, which are Unix times.
    """

    replica_id: str
    number: int
    seen_s: float
    started_s: float = 0.0
    load: int = 0
    traffic: float = 0.0
    resident: set[str] = field(default_factory=set)
    active: Mapping[str, int] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)
    prefixes: set[bytes] = field(default_factory=set)

    def apply(self, delta: ReplicaDelta, now_s: float) -> dict[Key, Row | None]:
        """Apply the next delta, or a full report; returns the rows that it changes, None for those it deletes."""
        self.traffic += (delta.load - self.traffic) * -math.expm1((self.seen_s - now_s) / TRAFFIC_S)
        self.number, self.seen_s, self.load, self.active = delta.number, now_s, delta.load, delta.active
        return self._update_resident(delta) | self._update_prefixes(delta)

    def row_keys(self) -> list[Key]:
        """The keys of all its rows."""
        keys: list[Key] = [("prefixes", self.replica_id)] if self.prefixes else []
        return [*keys, *(("resident", digest, self.replica_id) for digest in self.resident)]

    def _update_resident(self, delta: ReplicaDelta) -> dict[Key, Row | None]:
        changes: dict[Key, Row | None] = {}
        unloaded = self.resident.difference(delta.loaded) if delta.is_whole else set(delta.unloaded)
        for digest in unloaded & self.resident:
            changes["resident", digest, self.replica_id] = None
        for digest in delta.loaded:
            if digest not in self.resident:
                row = (str(delta.num_rows[digest]),) if digest in delta.num_rows else ()
                changes["resident", digest, self.replica_id] = row
        self.resident = (self.resident - unloaded).union(delta.loaded)
        self.used_s.update(delta.used_s)
        if unloaded:
            self.used_s = {each: at_s for each, at_s in self.used_s.items() if each in self.resident}
        return changes

    def _update_prefixes(self, delta: ReplicaDelta) -> dict[Key, Row | None]:
        prefixes = set() if delta.is_whole else self.prefixes.difference(delta.dropped_prefixes)
        prefixes.update(delta.cached_prefixes)
        if prefixes == self.prefixes:
            return {}
        self.prefixes = prefixes
        return {("prefixes", self.replica_id): tuple(sorted(prefix.hex() for prefix in prefixes)) or None}
