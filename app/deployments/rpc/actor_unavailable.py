"""An actor that does not answer, and what is said of it.

In: that a call of it failed, or succeeded. Out: a line in the log when it is away, and one when it answers again. Rule:
an actor is called for a dozen reasons at once, and its absence is told once for all of them; who meets `ActorUnavailable` says
nothing of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: An absence that begins so soon after one was told is the same: calls that it ended are heard of one after the other.
QUIET_S = 10.0


class ActorUnavailable(NotReady):
    """A named actor, or what it answered, is lost for now; ask again."""


class UnavailableLog:
    """Of one actor, as one process meets it."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._since_s: float | None = None
        self._is_told = False
        self._told_s = -math.inf

    def met(self, error: ActorUnavailable) -> None:
        """It did not answer."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s, self._is_told = now_s, False
        if not self._is_told and now_s - self._told_s >= QUIET_S:
            self._is_told, self._told_s = True, now_s
            logger.warning("%s; until then what it has told stands, and what it is to be told waits", error)

    def over(self) -> None:
        """It answers."""
        if self._since_s is None:
            return
        if self._is_told:
            logger.info("%s answers again, after %.1f s", self._name, self._clock() - self._since_s)
        self._since_s = None
