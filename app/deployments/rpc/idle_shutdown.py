"""Shutdown of a detached actor that has no watchers any more.

Watchers call the actor every few seconds while they live. They stop when the service was shut down, or deployed with
settings that give its actors other names; nothing else would end the old actors. An actor that exits too early is
created again by the next call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from app.deployments.rpc.background_tasks import Tasks

#: Longer than a watcher's interval, and than replacing all replicas of a service at once takes.
IDLE_TIMEOUT_S = 180.0
CHECK_INTERVAL_S = 5.0


class IdleShutdown:
    """Calls `exit_actor` once no watcher has called for `IDLE_TIMEOUT_S`; on the actor's event loop."""

    def __init__(self, exit_actor: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._exit_actor = exit_actor
        self._clock = clock
        self._last_s = clock()
        self._tasks = Tasks()

    def touch(self) -> None:
        """A watcher has called."""
        self._last_s = self._clock()
        if not self._tasks:
            self._tasks.start(self._wait())

    async def _wait(self) -> None:
        while self._clock() - self._last_s <= IDLE_TIMEOUT_S:
            await asyncio.sleep(CHECK_INTERVAL_S)
        self._exit_actor()
