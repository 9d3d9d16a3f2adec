"""Which of the things that may leave a tier leaves first: one rule for files, host memory and rank rows.

In: uses, each with what it would cost per unit of room to get the thing again. Out: priorities; the lowest leaves
first, and of equals the one used longest ago:

    lru    the time of its last use
    lfu    age + uses                                  (LFU with dynamic ageing)
    cost   age + uses * cost / room                    (GreedyDual-Size-Frequency, Cherkasova 1998)

The age is the priority of the last thing that left, so that what was popular once grows old. Each tier says itself
what may not leave (because it is pinned or in use), and makes the room: `adapter_pool` for rank rows, the store's
`bounded_set` for files and host memory.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.config import EvictionPolicy


class Priority(NamedTuple):
    """Compared as a tuple."""

    value: float
    last_used: int


#: Before every priority that a use can give.
NEVER = Priority(0.0, 0)


class EvictionOrder:
    """The priorities of one tier. Not for several threads at once."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._age = 0.0
        self._num_uses = 0

    def used(self, uses: int, cost_per_room: float) -> Priority:
        """The priority of a thing that is used now, for the `uses`-th time."""
        self._num_uses += 1
        worth = {"lru": 0.0, "lfu": 1.0, "cost": cost_per_room}[self.policy]
        return Priority(self._age + uses * worth, self._num_uses)

    def touched(self, priority: Priority) -> Priority:
        """The priority of a thing whose use ends now: that is no further use, but as recent as one."""
        self._num_uses += 1
        return Priority(priority.value, self._num_uses)

    def gave_up(self, priority: Priority) -> None:
        """A thing of this priority has left to make room."""
        self._age = max(self._age, priority.value)
