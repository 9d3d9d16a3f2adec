"""Which replicas ingresses cannot reach, and how much of that is believed.

In: what each ingress says, again and again while it lasts. Out: the verdict on a replica. Rule: one ingress alone takes
no replica that still speaks off everybody's table: its own way to it may be what is broken.
"""

from __future__ import annotations

from collections.abc import Collection

#: A word counts for this long; whoever still cannot reach a replica says so again before.
WORD_S = 5.0


class ReachabilityVotes:
    """Who cannot reach whom. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._words: dict[str, dict[str, float]] = {}  # replica -> ingress -> when it last said so

    def say(self, ingress_id: str, unreached: Collection[str], now_s: float) -> None:
        """An ingress names all replicas that it cannot reach now; what it said before no longer counts."""
        for replica_id in [*self._words]:
            if replica_id not in unreached and self._words[replica_id].pop(ingress_id, None) is not None:
                self._prune(replica_id, now_s)
        for replica_id in unreached:
            self._words.setdefault(replica_id, {})[ingress_id] = now_s

    def num(self, replica_id: str, now_s: float) -> int:
        """Ingresses that cannot reach this replica."""
        self._prune(replica_id, now_s)
        return len(self._words.get(replica_id, ()))

    def is_out_of_reach(self, replica_id: str, now_s: float, num_ingresses: int) -> bool:
        """Whether two ingresses say so, and more than half of all: then it is the replica's way that is broken."""
        num = self.num(replica_id, now_s)
        return num >= 2 and 2 * num > num_ingresses

    def forget(self, replica_id: str) -> None:
        """A replica that is no more."""
        self._words.pop(replica_id, None)

    def _prune(self, replica_id: str, now_s: float) -> None:
        words = {each: at_s for each, at_s in self._words.pop(replica_id, {}).items() if now_s - at_s <= WORD_S}
        if words:
            self._words[replica_id] = words
