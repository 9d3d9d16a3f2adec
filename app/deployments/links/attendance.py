"""When a detached actor ends: once nobody has watched it for a while.

In: the calls of those who watch, which renew them every few seconds for as long as they live. Out: one call of `leave`
when they have stopped: the service was shut down, or deployed anew with settings that give its actors other names, and
nothing else would ever end what it left behind. One that leaves too early is made again by the next call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from app.deployments.links.tasks import Tasks

#: Longer than a watcher's interval, and than it takes to replace every replica of a service at once.
PATIENCE_S = 180.0
CHECK_INTERVAL_S = 5.0


class Attendance:
    """Of one actor, on its event loop. A call that has been asked for is somebody, for `PATIENCE_S`."""

    def __init__(self, leave: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._leave = leave
        self._clock = clock
        self._last_s = clock()
        self._tasks = Tasks()

    def here(self) -> None:
        """Somebody is."""
        self._last_s = self._clock()
        if not self._tasks:
            self._tasks.start(self._wait())

    async def _wait(self) -> None:
        while self._clock() - self._last_s <= PATIENCE_S:
            await asyncio.sleep(CHECK_INTERVAL_S)
        self._leave()
