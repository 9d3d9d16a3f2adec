"""A detached actor ends once nobody has watched it for a while.

In: the calls of those who watch; they renew them every few seconds for as long as they live. Out: a call of `exit_actor`
when they have stopped. That happens when the service was shut down, or deployed anew with settings that give its actors
other names; nothing else would end the actors that it left behind. An actor that leaves too early is made again by the
next call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from app.deployments.rpc.background_tasks import Tasks

#: Longer than a watcher's interval, and than it takes to replace every replica of a service at once.
PATIENCE_S = 180.0
CHECK_INTERVAL_S = 5.0


class IdleShutdown:
    """Whether anybody watches one actor, on its event loop. A call counts as a watcher for `PATIENCE_S`."""

    def __init__(self, leave: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._leave = leave
        self._clock = clock
        self._last_s = clock()
        self._tasks = Tasks()

    def here(self) -> None:
        """A watcher has called."""
        self._last_s = self._clock()
        if not self._tasks:
            self._tasks.start(self._wait())

    async def _wait(self) -> None:
        while self._clock() - self._last_s <= PATIENCE_S:
            await asyncio.sleep(CHECK_INTERVAL_S)
        self._leave()
