"""What a placement policy answers, and how one request uses the answer.

In: an adapter's digest and the placement table. Out: the replicas that may serve it, and for one request the least
loaded of them. Nothing here remembers anything: the same table gives the same answer in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from app.deployments.placement.table import PlacementTable


class PlacementPolicy(Protocol):
    """Where an adapter may be served. An empty answer means anywhere; without `has_homes` it is always empty."""

    has_homes: bool

    def homes(self, digest: str, table: PlacementTable) -> tuple[str, ...]: ...


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
