"""Replica load as one ingress knows it: the last report, plus this ingress's own changes since that report.

Counting changes since the moment of the report avoids counting a request twice, or missing it for long; otherwise
several ingresses would all choose the same idle replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from app.deployments.placement.messages import ReplicaLoad

#: Changes are remembered for this long. An older report counts as if it had been made then.
MAX_CHANGE_AGE_S = 30.0


@dataclass(slots=True)
class _Replica:
    """Our requests on a replica now, its reported number, our requests at the time of that report, and our changes
    since."""

    num_own: int = 0
    num_reported: int = 0
    num_own_at_report: int = 0
    changes: deque[tuple[float, int]] = field(default_factory=deque)  # (time, difference)


class ReplicaLoadTracker:
    """One per ingress. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}

    @property
    def own(self) -> dict[str, int]:
        """Our requests per replica, without zeros."""
        return {replica_id: replica.num_own for replica_id, replica in self._replicas.items() if replica.num_own}

    def num_requests(self, replica_id: str) -> int:
        """Estimated requests on a replica; never fewer than our own."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0
        return replica.num_own + max(0, replica.num_reported - replica.num_own_at_report)

    def add(self, replica_id: str, by: int) -> None:
        """Add `by` of our requests to a replica (negative when they leave)."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        replica.num_own += by
        now_s = self._clock()
        replica.changes.append((now_s, by))
        _fold_changes(replica, now_s - MAX_CHANGE_AGE_S)

    def apply_reports(self, rows: Mapping[str, ReplicaLoad | None], now_s: float) -> None:
        """Apply reports; `now_s` is the sender's clock when it sent them. None: the replica is gone."""
        ahead_s = self._clock() - now_s
        for replica_id, row in rows.items():
            replica = self._replicas.setdefault(replica_id, _Replica())
            if row is None:
                replica.num_reported = 0
            else:
                replica.num_reported, reported_s = row
                _fold_changes(replica, reported_s + ahead_s)

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget replicas that are not among these and have none of our requests."""
        self._replicas = {
            each: replica for each, replica in self._replicas.items() if replica.num_own or each in replica_ids
        }


def _fold_changes(replica: _Replica, until_s: float) -> None:
    """Move changes up to `until_s` into the number at the last report."""
    while replica.changes and replica.changes[0][0] <= until_s:
        replica.num_own_at_report += replica.changes.popleft()[1]
