"""Reports of one replica to placement, as deltas.

A delta that placement may have missed is followed by a full report, never by another delta.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from app.deployments.placement.messages import ReplicaDelta, ReplicaIdentity, ReplicaReport

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
