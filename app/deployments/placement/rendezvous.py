"""The order in which an adapter prefers replicas: rendezvous hashing (Thaler & Ravishankar 1998).

In: a digest and the replicas. Out: the replicas, the preferred one first. The order depends on nothing else, so
every process computes the same one, and a replica that comes or goes changes no other's place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def rendezvous_order(digest: str, replica_ids: Iterable[str]) -> list[str]:
    """Replicas by falling score H(digest, replica): each adapter has its own order, the same everywhere."""

    def score(replica_id: str) -> bytes:
        return hashlib.blake2b(f"{digest}\0{replica_id}".encode(), digest_size=8).digest()

    return sorted(replica_ids, key=score, reverse=True)
