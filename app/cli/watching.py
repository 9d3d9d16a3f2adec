"""What becomes of a running service's replicas, in words for the terminal.

In: how many replicas of each deployment run, and what Serve does with it, as it says now and then. Out: a line when one
was lost, and one when as many run again. Rule: a replica that is stopped on purpose (a redeployment, a smaller load) is
no loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: What Serve does with a deployment whose replicas it stops itself.
ON_PURPOSE = frozenset({"UPDATING", "UPSCALING", "DOWNSCALING"})


class ReplicaWatch:
    """`say` gets a line; `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._running: dict[str, int] = {}
        self._lost: dict[str, tuple[int, float]] = {}  # by deployment: how many ran before, and when one was lost

    def look(self, deployments: Mapping[str, tuple[str, int]]) -> None:
        """deployments: by name, what Serve does with it, and how many replicas run."""
        for name, (doing, now) in deployments.items():
            before = self._running.get(name, 0)
            self._running[name] = now
            if now < before and doing not in ON_PURPOSE:
                self._lost.setdefault(name, (before, self._clock()))
                self._say(f"{before - now} of {before} {name} lost; Serve starts another")
            elif name in self._lost and now >= self._lost[name][0]:
                _, since_s = self._lost.pop(name)
                self._say(f"{now} {name} again, after {self._clock() - since_s:.0f} s")


def deployments_of(applications: Iterable[Any]) -> dict[str, tuple[str, int]]:
    """What `ReplicaWatch.look` takes, of applications as Serve's status has them."""
    return {
        title: (deployment.status.value, replica_counts(deployment).get("RUNNING", 0))
        for application in applications
        for title, deployment in application.deployments.items()
    }


def replica_counts(deployment: Any) -> dict[str, int]:
    """How many replicas are in which state. Serve's own type says that states are enum members; over Ray they come as
    their names."""
    return {getattr(state, "value", state): number for state, number in deployment.replica_states.items()}
