"""Tasks that belong to an object and not to the call during which they began.

In: coroutines. Out: tasks that run whether or not anybody waits for them. The owner holds them, or they could be
collected while they run. Each has an empty context: Serve cancels every task that carries the context of a request when
that request ends. A failure is logged, so that none is lost. Rule: when `close` has returned, none of them runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.engine.errors import PolyloraError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """The tasks of one owner, on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Task[Any] | None = None  # the first of `run_forever` that did not run for ever

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` beside everything else. Whoever waits for the task should `shield` it if others do, too."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(self._end)
        return task

    def run_forever(self, *works: Coroutine[Any, Any, Any]) -> None:
        """Run work that ends only with its owner; `check` tells when one has ended before."""
        for work in works:
            self.start(work).add_done_callback(self._end_early)

    def check(self) -> None:
        """Raise RuntimeError if work that should run for ever has ended: a health check."""
        if self._ended is not None:
            error = None if self._ended.cancelled() else self._ended.exception()
            raise RuntimeError(f"{_name(self._ended)} has ended; it should run as long as the process") from error

    def cancel(self) -> None:
        """Have every task end; nobody waits for it."""
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        """Cancel every task, and return when the last has ended."""
        running = list(self._running)
        self.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PolyloraError):  # somebody's mistake or bad luck; it says all there is to know
            logger.info("%s failed: %s", _name(task), error)
        else:
            logger.error("%s failed", _name(task), exc_info=error)

    def _end_early(self, task: asyncio.Task[Any]) -> None:
        self._ended = self._ended or task


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())
