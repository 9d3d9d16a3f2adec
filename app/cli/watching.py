"""What becomes of a running service's replicas, in words for the terminal.

In: how many replicas of each deployment are in which state, as Serve says now and then. Out: a line when one was lost,
and one when as many run again. Rule: a replica that is stopped on purpose (a redeployment, a smaller load) is no loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

#: What replicas are in, by Serve's words.
RUNNING, STOPPING = "RUNNING", "STOPPING"


class ReplicaWatch:
    """`say` gets a line; `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._running: dict[str, int] = {}
        self._lost: dict[str, tuple[int, float]] = {}  # by deployment: how many ran before, and when one was lost

    def look(self, deployments: Mapping[str, Mapping[str, int]]) -> None:
        """deployments: by name, how many replicas are in which state."""
        for name, states in deployments.items():
            now, before = states.get(RUNNING, 0), self._running.get(name, 0)
            self._running[name] = now
            if now < before and not states.get(STOPPING, 0):
                self._lost.setdefault(name, (before, self._clock()))
                self._say(f"{before - now} of {before} {name} lost; Serve starts another")
            elif name in self._lost and now >= self._lost[name][0]:
                _, since_s = self._lost.pop(name)
                self._say(f"{now} {name} again, after {self._clock() - since_s:.0f} s")
