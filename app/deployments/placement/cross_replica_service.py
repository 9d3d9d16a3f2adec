"""What each tenant was served on all replicas, so that each of them can be told what it was served on the others.

In: totals that replicas count themselves, with their reports. Out: for a replica, the sums of what the others have
counted. Rule: only growth between two reports of one replica counts, so whoever begins to listen, here or there, begins
at nothing; a replica that leaves takes its part along. Sums are kept, so an answer costs what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.deployments.placement.messages import ReplicaDelta

#: Tenants that are remembered of one replica, the last that it named.
MAX_TENANTS = 1024


@dataclass(slots=True)
class _Replica:
    number: int = -1  # of its last report
    told: dict[str, float] = field(default_factory=dict)  # its own totals, by last named
    grown: dict[str, float] = field(default_factory=dict)  # of these, what came since it first named the tenant


class CrossReplicaService:
    """Placement's. Amounts are the fair queue's: prompt tokens by weight."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._sums: dict[str, float] = {}

    def hear(self, news: ReplicaDelta) -> None:
        """A replica reports; a message that a later one has overtaken says nothing new."""
        replica = self._replicas.setdefault(news.replica_id, _Replica())
        if news.number <= replica.number:
            return
        replica.number = news.number
        for tenant_id, total in news.served.items():
            before = replica.told.pop(tenant_id, total)
            replica.told[tenant_id] = total
            grown = max(0.0, total - before)
            replica.grown[tenant_id] = replica.grown.get(tenant_id, 0.0) + grown
            self._sums[tenant_id] = self._sums.get(tenant_id, 0.0) + grown
        while len(replica.told) > MAX_TENANTS:
            oldest = next(iter(replica.told))
            del replica.told[oldest]
            self._subtract(oldest, replica.grown.pop(oldest))

    def elsewhere(self, replica_id: str, tenant_ids: Iterable[str]) -> dict[str, float]:
        """What these tenants were served on other replicas than this one, since those were first heard."""
        replica = self._replicas.get(replica_id)
        here: Mapping[str, float] = replica.grown if replica is not None else {}
        return {
            tenant_id: max(0.0, self._sums.get(tenant_id, 0.0) - here.get(tenant_id, 0.0)) for tenant_id in tenant_ids
        }

    def keep(self, replica_ids: Iterable[str]) -> None:
        """All other replicas have left."""
        for replica_id in self._replicas.keys() - set(replica_ids):
            for tenant_id, grown in self._replicas.pop(replica_id).grown.items():
                self._subtract(tenant_id, grown)
        if not self._replicas:
            self._sums.clear()

    def _subtract(self, tenant_id: str, grown: float) -> None:
        left = self._sums.pop(tenant_id, 0.0) - grown
        if left > 0.0:
            self._sums[tenant_id] = left
