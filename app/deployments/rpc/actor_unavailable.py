"""The error of an actor that does not answer, and its log.

Many callers notice an outage at once; it is logged once for all of them, and again when the actor answers. Callers that
catch `ActorUnavailable` log nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: A failure so soon after a logged outage belongs to it: interrupted calls fail one after the other.
QUIET_S = 10.0


class ActorUnavailable(NotReady):
    """A named actor, or its answer, is unavailable for now; retry."""


class UnavailableLog:
    """Log of one actor's outages, as one process notices them."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._since_s: float | None = None
        self._is_logged = False
        self._logged_s = -math.inf

    def on_error(self, error: ActorUnavailable) -> None:
        """A call found the actor unavailable."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s, self._is_logged = now_s, False
        if not self._is_logged and now_s - self._logged_s >= QUIET_S:
            self._is_logged, self._logged_s = True, now_s
            logger.warning("%s; until it answers its last state is used and reports to it wait", error)

    def on_recovery(self) -> None:
        """A call succeeded."""
        if self._since_s is None:
            return
        if self._is_logged:
            logger.info("%s answers again, after %.1f s", self._name, self._clock() - self._since_s)
        self._since_s = None
