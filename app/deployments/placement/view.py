"""Where adapters are, as one process knows it: a copy of placement's table with quick answers.

In: rows of the table, as they change. Out: which replicas there are, an adapter's homes, who holds it. Rule: an answer
costs what it returns, whatever the number of replicas and adapters. The placement actor keeps its own table in a view,
too, so that both give a policy the same answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, KeysView, Mapping, Sequence, Set

from app.deployments.placement.messages import Key, Row
from app.deployments.placement.rendezvous import Rendezvous
from app.deployments.rpc.long_poll_client import TableSync
from app.deployments.rpc.long_poll_host import Changes

#: Homes that were answered and not yet published that are kept, the last ones.
MAX_ANSWERED = 4096


class PlacementView:
    """One event loop. It is a `PlacementFleet` without loads."""

    def __init__(self) -> None:
        self._replicas: dict[str, Row] = {}
        self._num_rows: dict[str, int] = {}  # of adapters that have a home, or are on a device
        self._total_rows = 0
        self._homes: dict[str, Row] = {}
        self._holders: dict[str, set[str]] = {}
        self._at_home: dict[str, set[str]] = {}
        self._answered: dict[str, Row] = {}
        self._num_homes: Counter[str] = Counter()
        self._heads: dict[str, Row] = {}  # by replica
        self._with_head: dict[str, list[str]] = {}
        self._rendezvous: Rendezvous | None = None
        self._sync: TableSync[Key, Row] = TableSync()
        self.num_replica_changes = 0
        self._num_kv_tokens: int | None = None  # to be computed from the replicas' rows

    @property
    def replicas(self) -> KeysView[str]:
        """The replicas on the table."""
        return self._replicas.keys()

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    @property
    def num_homes(self) -> int:
        return self._num_homes.total()

    def num_homes_at(self, replica_id: str) -> int:
        """Adapters whose home this replica is."""
        return self._num_homes[replica_id]

    def at_home(self, replica_id: str) -> Set[str]:
        """Those adapters."""
        return self._at_home.get(replica_id, set())

    def started_s(self, replica_id: str) -> float:
        """When the replica was started (Unix time)."""
        return float(self._replicas[replica_id][0])

    def num_rank_rows(self, replica_id: str) -> int:
        """Rank rows that the replica has."""
        return int(self._replicas[replica_id][1])

    @property
    def num_kv_tokens(self) -> int:
        """What the KV memory of each replica holds at least; 0 if the model has no such memory."""
        if self._num_kv_tokens is None:
            known = [int(row[2]) for row in self._replicas.values()]
            self._num_kv_tokens = min(filter(None, known), default=0)
        return self._num_kv_tokens

    def num_rows(self, digest: str) -> int:
        """Rank rows that the adapter takes; 0 as long as no device has held it."""
        return self._num_rows.get(digest, 0)

    @property
    def usual_rows(self) -> float:
        """Rank rows that an adapter takes on average; 1 as long as nothing is known of any."""
        return self._total_rows / len(self._num_rows) if self._num_rows else 1.0

    def homes(self, digest: str) -> Row:
        """The replicas that serve the adapter, oldest first; empty if it has no home."""
        return self._homes.get(digest) or self._answered.get(digest, ())

    def is_resident(self, digest: str) -> bool:
        """Whether the adapter was on any replica's device when that last said so."""
        return digest in self._holders

    def holders(self, digest: str) -> list[str]:
        """Replicas whose device holds the adapter, in the order in which it prefers them."""
        holders = self._holders.get(digest, set()) & self._replicas.keys()
        return [*holders] if len(holders) < 2 else [each for each in self.preferred(digest) if each in holders]

    @property
    def has_heads(self) -> bool:
        """Whether any replica has said what it has cached of what prompts begin with."""
        return bool(self._heads)

    def with_head(self, head: str) -> Sequence[str]:
        """The replicas that have cached what a prompt begins with, by its name in hexadecimal digits; any order."""
        return self._with_head.get(head, ())

    def preferred(self, digest: str) -> Iterator[str]:
        """All replicas, in the adapter's own order."""
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._replicas)
        return self._rendezvous.preferred(digest)

    def take(self, news: Changes[Key, Row]) -> None:
        """Take over a page of the table."""
        self.apply(self._sync.changes(news, self._keys))

    def answer(self, homes: Mapping[str, Row]) -> None:
        """Homes that placement has given on a question; the table's own row follows, and counts instead."""
        for digest, row in homes.items():
            if digest not in self._homes:
                self._answered[digest] = row
        while len(self._answered) > MAX_ANSWERED:
            del self._answered[next(iter(self._answered))]

    def apply(self, rows: Mapping[Key, Row | None]) -> None:
        """Take over changes; None stands for a row that is no more."""
        for key, row in rows.items():
            if key[0] == "home":
                self._set_homes(key[1], row)
            elif key[0] == "resident":
                self._set_holder(key[1], key[2], row)
            elif key[0] == "replica":
                self._set_replica(key[1], row)
            elif key[0] == "heads":
                self._set_heads(key[1], row or ())

    def _set_homes(self, digest: str, row: Row | None) -> None:
        self._answered.pop(digest, None)
        for home in self._homes.pop(digest, ()):
            self._num_homes[home] -= 1
            self._at_home[home].discard(digest)
            if not self._at_home[home]:
                del self._at_home[home], self._num_homes[home]
        if row is not None:
            self._homes[digest] = row
            for home in row:
                self._num_homes[home] += 1
                self._at_home.setdefault(home, set()).add(digest)
        self._prune(digest)

    def _set_holder(self, digest: str, replica_id: str, row: Row | None) -> None:
        if row is not None:
            self._holders.setdefault(digest, set()).add(replica_id)
            if row:
                self._total_rows += int(row[0]) - self._num_rows.get(digest, 0)
                self._num_rows[digest] = int(row[0])
        elif digest in self._holders:
            self._holders[digest].discard(replica_id)
            if not self._holders[digest]:
                del self._holders[digest]
        self._prune(digest)

    def _set_heads(self, replica_id: str, row: Row) -> None:
        before = self._heads.pop(replica_id, ())
        for head in before:
            if head not in row:
                self._with_head[head].remove(replica_id)
                if not self._with_head[head]:
                    del self._with_head[head]
        for head in row:
            if head not in before:
                self._with_head.setdefault(head, []).append(replica_id)
        if row:
            self._heads[replica_id] = row

    def _prune(self, digest: str) -> None:
        if digest not in self._homes and digest not in self._holders:
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
        yield from (("home", digest) for digest in self._homes)
        yield from (("heads", replica_id) for replica_id in self._heads)
        for digest, holders in self._holders.items():
            yield from (("resident", digest, replica_id) for replica_id in holders)


class UsableFleet:
    """A view without the replicas that cannot be used, for a policy (`PlacementFleet`).

    Without `traffic`, what a replica has now stands for what it has had lately.
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
    def num_homes(self) -> int:
        return self._view.num_homes

    def num_homes_at(self, replica_id: str) -> int:
        return self._view.num_homes_at(replica_id)

    def num_rank_rows(self, replica_id: str) -> int:
        return self._view.num_rank_rows(replica_id)

    def num_rows(self, digest: str) -> int:
        return self._view.num_rows(digest)

    def num_rows_at(self, replica_id: str) -> int:
        known = [rows for rows in map(self._view.num_rows, self._view.at_home(replica_id)) if rows]
        num_unknown = self._view.num_homes_at(replica_id) - len(known)
        return round(sum(known) + num_unknown * self._view.usual_rows)

    def started_s(self, replica_id: str) -> float:
        return self._view.started_s(replica_id)

    def holders(self, digest: str) -> list[str]:
        return [each for each in self._view.holders(digest) if each in self._usable]

    def preferred(self, digest: str) -> Iterator[str]:
        return (each for each in self._view.preferred(digest) if each in self._usable)
