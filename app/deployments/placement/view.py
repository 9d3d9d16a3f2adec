"""One process's copy of the placement table, indexed for quick answers.

Each answer costs as much as it returns, whatever the number of replicas and adapters. The placement actor keeps its own
table in a view too, so both give a policy the same answers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from app.deployments.placement.messages import DrainingReplica, Key, Row
from app.deployments.rpc.long_poll_client import TableSync
from app.deployments.rpc.long_poll_host import Changes

#: Assignments that were answered to this process but not yet published; the newest are kept.
MAX_PENDING = 4096
#: This many are found without sorting the others.
_FIRST = 16
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class PlacementView:
    """A `PlacementFleet` without loads. One event loop. `draining`: replicas that take no new requests, by id."""

    def __init__(self) -> None:
        self._replicas: dict[str, Row] = {}
        self._num_rows: dict[str, int] = {}  # of adapters that are assigned or resident
        self._total_rows = 0
        self._assigned: dict[str, Row] = {}
        self._resident: dict[str, set[str]] = {}
        self._assigned_adapters: dict[str, set[str]] = {}
        self._pending: dict[str, Row] = {}
        self._num_assigned: Counter[str] = Counter()
        self._prefixes: dict[str, Row] = {}  # by replica
        self._by_prefix: dict[str, list[str]] = {}
        self._rendezvous: Rendezvous | None = None
        self._sync: TableSync[Key, Row] = TableSync()
        self.num_replica_changes = 0
        self.draining: dict[str, DrainingReplica] = {}
        self._num_kv_tokens: int | None = None  # None: to be computed from the replicas' rows

    @property
    def replicas(self) -> KeysView[str]:
        """The live replicas."""
        return self._replicas.keys()

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    @property
    def num_assignments(self) -> int:
        return self._num_assigned.total()

    def num_assigned_to(self, replica_id: str) -> int:
        """Adapters assigned to this replica."""
        return self._num_assigned[replica_id]

    def assigned_adapters(self, replica_id: str) -> Set[str]:
        """Digests of the adapters assigned to this replica."""
        return self._assigned_adapters.get(replica_id, set())

    def started_s(self, replica_id: str) -> float:
        """When the replica was started (Unix time)."""
        return float(self._replicas[replica_id][0])

    def num_rank_rows(self, replica_id: str) -> int:
        """Rank rows that the replica has."""
        return int(self._replicas[replica_id][1])

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that each replica's KV memory holds at least; 0 if the model has no such memory."""
        if self._num_kv_tokens is None:
            known = [int(row[2]) for row in self._replicas.values()]
            self._num_kv_tokens = min(filter(None, known), default=0)
        return self._num_kv_tokens

    def num_rows(self, digest: str) -> int:
        """Rank rows of the adapter; 0 until a device has held it."""
        return self._num_rows.get(digest, 0)

    @property
    def mean_rows(self) -> float:
        """Mean number of rank rows of an adapter; 1 while none is known."""
        return self._total_rows / len(self._num_rows) if self._num_rows else 1.0

    def assigned_replicas(self, digest: str) -> Row:
        """The replicas assigned to the adapter, oldest first; may be empty."""
        return self._assigned.get(digest) or self._pending.get(digest, ())

    def is_resident(self, digest: str) -> bool:
        """Whether any replica reported the adapter as resident."""
        return digest in self._resident

    def resident_replicas(self, digest: str) -> list[str]:
        """Replicas whose device holds the adapter, in its order of preference."""
        resident_on = self._resident.get(digest, set()) & self._replicas.keys()
        return (
            [*resident_on]
            if len(resident_on) < 2
            else [each for each in self.preference_order(digest) if each in resident_on]
        )

    @property
    def has_prefixes(self) -> bool:
        """Whether any replica has reported cached prompt prefixes."""
        return bool(self._prefixes)

    def replicas_with_prefix(self, prefix: str) -> Sequence[str]:
        """The replicas that have cached a prompt prefix, by its hexadecimal hash; in any order."""
        return self._by_prefix.get(prefix, ())

    def preference_order(self, digest: str) -> Iterator[str]:
        """All replicas, in the adapter's order of preference."""
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._replicas)
        return self._rendezvous.preference_order(digest)

    def take(self, page: Changes[Key, Row]) -> None:
        """Apply a page of the table."""
        self.apply(self._sync.changes(page, self._keys))

    def add_pending(self, assigned: Mapping[str, Row]) -> None:
        """Use assignments that placement answered until the table's own rows arrive."""
        for digest, row in assigned.items():
            if digest not in self._assigned:
                self._pending[digest] = row
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def apply(self, rows: Mapping[Key, Row | None]) -> None:
        """Apply changed rows; None deletes a row."""
        for key, row in rows.items():
            if key[0] == "assigned":
                self._set_assigned(key[1], row)
            elif key[0] == "resident":
                self._set_resident(key[1], key[2], row)
            elif key[0] == "replica":
                self._set_replica(key[1], row)
            elif key[0] == "draining":
                self._set_draining(key[1], row)
            elif key[0] == "prefixes":
                self._set_prefixes(key[1], row or ())

    def _set_assigned(self, digest: str, row: Row | None) -> None:
        self._pending.pop(digest, None)
        for replica_id in self._assigned.pop(digest, ()):
            self._num_assigned[replica_id] -= 1
            self._assigned_adapters[replica_id].discard(digest)
            if not self._assigned_adapters[replica_id]:
                del self._assigned_adapters[replica_id], self._num_assigned[replica_id]
        if row is not None:
            self._assigned[digest] = row
            for replica_id in row:
                self._num_assigned[replica_id] += 1
                self._assigned_adapters.setdefault(replica_id, set()).add(digest)
        self._prune(digest)

    def _set_resident(self, digest: str, replica_id: str, row: Row | None) -> None:
        if row is not None:
            self._resident.setdefault(digest, set()).add(replica_id)
            if row:
                self._total_rows += int(row[0]) - self._num_rows.get(digest, 0)
                self._num_rows[digest] = int(row[0])
        elif digest in self._resident:
            self._resident[digest].discard(replica_id)
            if not self._resident[digest]:
                del self._resident[digest]
        self._prune(digest)

    def _set_prefixes(self, replica_id: str, row: Row) -> None:
        before = self._prefixes.pop(replica_id, ())
        for prefix in before:
            if prefix not in row:
                self._by_prefix[prefix].remove(replica_id)
                if not self._by_prefix[prefix]:
                    del self._by_prefix[prefix]
        for prefix in row:
            if prefix not in before:
                self._by_prefix.setdefault(prefix, []).append(replica_id)
        if row:
            self._prefixes[replica_id] = row

    def _set_draining(self, replica_id: str, row: Row | None) -> None:
        if row is None:
            self.draining.pop(replica_id, None)
        else:
            self.draining[replica_id] = DrainingReplica(float(row[0]), int(row[1]))

    def _prune(self, digest: str) -> None:
        if digest not in self._assigned and digest not in self._resident:
            self._total_rows -= self._num_rows.pop(digest, 0)

    def _set_replica(self, replica_id: str, row: Row | None) -> None:
        was_there = replica_id in self._replicas
        if row is None:
            self._replicas.pop(replica_id, None)
        else:
            self._replicas[replica_id] = row
        self._num_kv_tokens = None
        if was_there == (row is not None):
            return
        self._rendezvous = None
        self.num_replica_changes += 1

    def _keys(self) -> Iterator[Key]:
        yield from (("replica", replica_id) for replica_id in self._replicas)
        yield from (("assigned", digest) for digest in self._assigned)
        yield from (("draining", replica_id) for replica_id in self.draining)
        yield from (("prefixes", replica_id) for replica_id in self._prefixes)
        for digest, resident_on in self._resident.items():
            yield from (("resident", digest, replica_id) for replica_id in resident_on)


class UsableFleet:
    """A view restricted to usable replicas, for a policy (`PlacementFleet`).

    Without `traffic`, the current load stands for the recent one.
    """

    def __init__(
        self,
        view: PlacementView,
        usable: Collection[str],
        load: Callable[[str], int],
        traffic: Callable[[str], float] | None = None,
    ) -> None:
        self._view = view
        self._usable = usable
        self.load = load
        self.traffic_at = traffic or load

    @property
    def num_replicas(self) -> int:
        return len(self._usable)

    @property
    def num_assignments(self) -> int:
        return self._view.num_assignments

    def num_assigned_to(self, replica_id: str) -> int:
        return self._view.num_assigned_to(replica_id)

    def num_rank_rows(self, replica_id: str) -> int:
        return self._view.num_rank_rows(replica_id)

    def num_rows(self, digest: str) -> int:
        return self._view.num_rows(digest)

    def num_rows_at(self, replica_id: str) -> int:
        known = [rows for rows in map(self._view.num_rows, self._view.assigned_adapters(replica_id)) if rows]
        num_unknown = self._view.num_assigned_to(replica_id) - len(known)
        return round(sum(known) + num_unknown * self._view.mean_rows)

    def started_s(self, replica_id: str) -> float:
        return self._view.started_s(replica_id)

    def resident_replicas(self, digest: str) -> list[str]:
        return [each for each in self._view.resident_replicas(digest) if each in self._usable]

    def preference_order(self, digest: str) -> Iterator[str]:
        return (each for each in self._view.preference_order(digest) if each in self._usable)


class Rendezvous:
    """Rendezvous hashing (Thaler & Ravishankar 1998): the order in which an adapter prefers replicas.

    The order of two replicas depends on the digest and these two alone, so every process computes the same order, and a
    replica that comes or goes does not move the others. A thousand replicas are ordered in about 50 us.
    """

    def __init__(self, replica_ids: Iterable[str] = ()) -> None:
        self._replica_ids = sorted(replica_ids)
        self._hashes = np.fromiter(map(_hash, self._replica_ids), np.uint64, len(self._replica_ids))

    def preference_order(self, digest: str) -> Iterator[str]:
        """All replicas by descending score of (digest, replica), lazily: the first few cost less than all."""
        scores = _mix(self._hashes ^ np.uint64(_hash(digest)))
        if len(scores) > 2 * _FIRST:
            first = np.argpartition(scores, -_FIRST)[-_FIRST:]
            for index in first[np.argsort(scores[first], kind="stable")[::-1]].tolist():
                yield self._replica_ids[index]
        order = np.argsort(scores, kind="stable")[::-1].tolist()
        for index in order[_FIRST:] if len(scores) > 2 * _FIRST else order:
            yield self._replica_ids[index]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea & Flood 2014), modulo 2^64: [N] -> [N]."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
