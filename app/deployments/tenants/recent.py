"""Sums over the last minute, by whatever they are of.

In: amounts as they come. Out: the sum of each key's since a minute ago. Rule: a key that nothing came for is forgotten
with the minute, so what is held is what was busy lately, and not all that there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Over so long a time it is looked, in steps of so long.
WINDOW_S, STEP_S = 60.0, 5.0


class RecentSums(Generic[K, V]):
    """One thread at a time. `clock` gives seconds and never goes back; `plus` adds two amounts."""

    def __init__(self, clock: Callable[[], float], plus: Callable[[V, V], V]) -> None:
        self._clock = clock
        self._plus = plus
        self._steps: deque[tuple[float, dict[K, V]]] = deque()

    def add(self, key: K, amount: V) -> None:
        now_s = self._clock()
        self._forget(now_s)
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, {}))
        self._add(self._steps[-1][1], key, amount)

    def sums(self) -> Mapping[K, V]:
        """Of the keys that something came for in the last minute."""
        self._forget(self._clock())
        sums: dict[K, V] = {}
        for _, step in self._steps:
            for key, amount in step.items():
                self._add(sums, key, amount)
        return sums

    def _add(self, sums: dict[K, V], key: K, amount: V) -> None:
        sums[key] = self._plus(sums[key], amount) if key in sums else amount

    def _forget(self, now_s: float) -> None:
        while self._steps and now_s - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()
