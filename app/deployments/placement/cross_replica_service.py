"""How much service each tenant got on all replicas, so that each replica's fair queue can count service elsewhere.

Replicas report totals. Only the growth between two reports of one replica counts, so a replica or tenant that appears
starts at zero, and a replica that leaves takes its part with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.deployments.placement.messages import ReplicaDelta

#: Tenants remembered per replica, the last that it named.
MAX_TENANTS = 1024


@dataclass(slots=True)
class _Replica:
    number: int = -1  # of its last delta
    totals: dict[str, float] = field(default_factory=dict)  # the replica's own totals; the last named tenant is last
    growth: dict[str, float] = field(default_factory=dict)  # growth since the replica first named the tenant


class CrossReplicaService:
    """The placement service's part. Amounts are the fair queue's: tokens by price and weight."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._sums: dict[str, float] = {}

    def ingest(self, delta: ReplicaDelta) -> None:
        """Apply a replica's totals; ignore a message that a later one has overtaken."""
        replica = self._replicas.setdefault(delta.replica_id, _Replica())
        if delta.number <= replica.number:
            return
        replica.number = delta.number
        for tenant_id, total in delta.served.items():
            before = replica.totals.pop(tenant_id, total)
            replica.totals[tenant_id] = total
            growth = max(0.0, total - before)
            replica.growth[tenant_id] = replica.growth.get(tenant_id, 0.0) + growth
            self._sums[tenant_id] = self._sums.get(tenant_id, 0.0) + growth
        while len(replica.totals) > MAX_TENANTS:
            oldest = next(iter(replica.totals))
            del replica.totals[oldest]
            self._subtract(oldest, replica.growth.pop(oldest))

    def elsewhere(self, replica_id: str, tenant_ids: Iterable[str]) -> dict[str, float]:
        """Service of these tenants on all other replicas than this one, since those first reported them."""
        replica = self._replicas.get(replica_id)
        here: Mapping[str, float] = replica.growth if replica is not None else {}
        return {
            tenant_id: max(0.0, self._sums.get(tenant_id, 0.0) - here.get(tenant_id, 0.0)) for tenant_id in tenant_ids
        }

    def keep(self, replica_ids: Iterable[str]) -> None:
        """All other replicas have left."""
        for replica_id in self._replicas.keys() - set(replica_ids):
            for tenant_id, growth in self._replicas.pop(replica_id).growth.items():
                self._subtract(tenant_id, growth)
        if not self._replicas:
            self._sums.clear()

    def _subtract(self, tenant_id: str, growth: float) -> None:
        remaining = self._sums.pop(tenant_id, 0.0) - growth
        if remaining > 0.0:
            self._sums[tenant_id] = remaining
