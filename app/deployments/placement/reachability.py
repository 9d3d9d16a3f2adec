"""Votes of ingresses on which replicas are unreachable.

One ingress alone cannot remove a replica that still reports: its own network path may be what is broken.
"""

from __future__ import annotations

from collections.abc import Collection

#: A vote counts for this long; an ingress repeats it earlier while it still cannot reach the replica.
VOTE_TTL_S = 5.0


class ReachabilityVotes:
    """Votes by replica and ingress. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._votes: dict[str, dict[str, float]] = {}  # replica -> ingress -> time of its last vote

    def vote(self, ingress_id: str, unreachable: Collection[str], now_s: float) -> None:
        """Record all replicas that an ingress cannot reach now; this replaces its earlier votes."""
        for replica_id in [*self._votes]:
            if replica_id not in unreachable and self._votes[replica_id].pop(ingress_id, None) is not None:
                self._prune(replica_id, now_s)
        for replica_id in unreachable:
            self._votes.setdefault(replica_id, {})[ingress_id] = now_s

    def num_votes(self, replica_id: str, now_s: float) -> int:
        """How many ingresses cannot reach this replica."""
        self._prune(replica_id, now_s)
        return len(self._votes.get(replica_id, ()))

    def is_out_of_reach(self, replica_id: str, now_s: float, num_ingresses: int) -> bool:
        """Whether at least two ingresses and more than half of all cannot reach the replica."""
        num = self.num_votes(replica_id, now_s)
        return num >= 2 and 2 * num > num_ingresses

    def remove(self, replica_id: str) -> None:
        """Drop the votes on a replica that no longer exists."""
        self._votes.pop(replica_id, None)

    def _prune(self, replica_id: str, now_s: float) -> None:
        votes = {each: at_s for each, at_s in self._votes.pop(replica_id, {}).items() if now_s - at_s <= VOTE_TTL_S}
        if votes:
            self._votes[replica_id] = votes
