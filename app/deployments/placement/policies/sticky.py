"""The default policy: an adapter stays where its rows are.

In: a digest and the table. Out: one home. Rendezvous hashing with bounded loads (Mirrokni et al. 2018): no replica
is home to more than `load_bound` times the mean, and losing a replica moves its own adapters only.
"""

from __future__ import annotations

import math

from app.deployments.placement.rendezvous import rendezvous_order
from app.deployments.placement.table import PlacementTable


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
