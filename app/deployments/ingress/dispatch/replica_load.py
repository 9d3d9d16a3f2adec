"""How loaded each replica is, as one ingress knows it without asking.

In: what replicas have reported, and what this ingress gives them and gets back. Out: a number per replica: what it last
reported, and what this ingress alone has changed since the moment in which it said so. Rule: no request is counted
twice or missed for long, so several ingresses do not all take the same replica for the idle one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from app.deployments.placement.messages import ReplicaLoad

#: Changes are remembered for this long: a report that is older counts as if it were of that time.
MEMORY_S = 30.0


@dataclass(slots=True)
class _Replica:
    """One replica: our requests on it now; how many it reported, and of ours there were then; our changes since."""

    num_own: int = 0
    num_reported: int = 0
    num_own_then: int = 0
    changes: deque[tuple[float, int]] = field(default_factory=deque)  # (when, by how many)


class ReplicaLoadTracker:
    """One per ingress. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}

    @property
    def own(self) -> dict[str, int]:
        """Our requests per replica; replicas without any are left out."""
        return {replica_id: replica.num_own for replica_id, replica in self._replicas.items() if replica.num_own}

    def of(self, replica_id: str) -> int:
        """Requests that a replica has now, as far as this process can know; never fewer than its own."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0
        return replica.num_own + max(0, replica.num_reported - replica.num_own_then)

    def change(self, replica_id: str, by: int) -> None:
        """So many requests of ours have gone to a replica, or (less than 0) have left it."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        replica.num_own += by
        now_s = self._clock()
        replica.changes.append((now_s, by))
        _pass(replica, now_s - MEMORY_S)

    def take(self, rows: Mapping[str, ReplicaLoad | None], now_s: float) -> None:
        """Reports, with the time at which they were sent on by the clock that they are dated with; None: it is gone."""
        ahead_s = self._clock() - now_s
        for replica_id, row in rows.items():
            replica = self._replicas.setdefault(replica_id, _Replica())
            if row is None:
                replica.num_reported = 0
            else:
                replica.num_reported, said_s = row
                _pass(replica, said_s + ahead_s)

    def keep(self, replica_ids: Collection[str]) -> None:
        """Forget replicas that are not among these and have none of our requests."""
        self._replicas = {
            each: replica for each, replica in self._replicas.items() if replica.num_own or each in replica_ids
        }


def _pass(replica: _Replica, until_s: float) -> None:
    """Count changes up to a moment as having been there when it last reported."""
    while replica.changes and replica.changes[0][0] <= until_s:
        replica.num_own_then += replica.changes.popleft()[1]
