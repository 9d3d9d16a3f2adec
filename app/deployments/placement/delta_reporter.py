"""How a replica tells placement of itself: by what has changed.

In: a replica's state, again and again. Out: messages, each with the changes since the one before. Rule: a message that
placement may not have had is followed by a whole one, never by changes.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from app.deployments.placement.messages import ReplicaDelta, ReplicaIdentity, ReplicaReport

#: So many tenants' service is told at a time, of those that were served most since.
MAX_TOLD_TENANTS = 64


class DeltaReporter:
    """One per replica. `origin` goes with every whole message."""

    def __init__(self, origin: ReplicaIdentity) -> None:
        self._origin = origin
        self._number = 0
        self._told: ReplicaReport | None = None
        self._told_served: dict[str, float] = {}

    def is_news(self, resident: tuple[str, ...]) -> bool:
        """Whether other adapters are resident than placement was told."""
        return self._told is None or self._told.resident != resident

    def news(self, state: ReplicaReport, *, is_leaving: bool = False) -> ReplicaDelta:
        """The next message. Ask `forget` for a whole one if placement does not take it."""
        told, self._told = self._told, state
        self._number += 1
        news = ReplicaDelta(
            state.replica_id,
            self._number,
            state.load,
            is_leaving=is_leaving,
            active=dict(state.active),
            served=self._served(state),
        )
        if told is None:
            used_s = dict(state.last_used_s)
            return replace(
                news,
                is_whole=True,
                loaded=state.resident,
                used_s=used_s,
                origin=self._origin,
                num_rows=dict(state.num_rows),
                num_rank_rows=state.num_rank_rows,
                num_kv_tokens=state.num_kv_tokens,
                cached_prefixes=state.cached_prefixes,
            )
        before, now = set(told.resident), set(state.resident)
        return replace(
            news,
            num_rows={digest: rows for digest, rows in state.num_rows.items() if digest not in before},
            loaded=tuple(sorted(now - before)),
            unloaded=tuple(sorted(before - now)),
            cached_prefixes=tuple(sorted({*state.cached_prefixes}.difference(told.cached_prefixes))),
            dropped_heads=tuple(sorted({*told.cached_prefixes}.difference(state.cached_prefixes))),
            used_s={d: used_s for d, used_s in state.last_used_s.items() if told.last_used_s.get(d) != used_s},
        )

    def _served(self, state: ReplicaReport) -> dict[str, float]:
        """Totals that have changed. They are totals, so a message that was lost is made good by the next."""
        since = {name: total - self._told_served.get(name, 0.0) for name, total in state.served.items()}
        changed = [name for name, amount in since.items() if amount]
        if len(changed) > MAX_TOLD_TENANTS:
            changed = heapq.nlargest(MAX_TOLD_TENANTS, changed, key=since.__getitem__)
        told = {name: state.served[name] for name in changed}
        self._told_served = {name: total for name, total in self._told_served.items() if name in state.served} | told
        return told

    def forget(self) -> None:
        """Placement may not know what it was told: the next message is a whole one."""
        self._told = None
