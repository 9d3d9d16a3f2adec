"""Tasks that belong to an object and not to the call during which they began.

In: coroutines. Out: tasks that run whether or not anybody waits for them. The owner holds them, or they could be
collected while they run. Each has an empty context: Serve cancels every task that carries the context of a request when
that request ends. A failure is logged, so that none is lost. Work that should run for ever is begun again when it
fails: an error of another process must not end this one. Rule: when `close` has returned, no task runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.engine.errors import PolyloraError

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

#: Work that has failed is begun again after this long; after twice as long each time, up to the second number.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0


class LogOnce:
    """What goes wrong again and again, each kind of error logged once until all is well again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told: set[type[BaseException]] = set()

    def met(self, error: Exception) -> None:
        """Log an error of a new kind: with its trace unless it is one of ours, which say all there is to know.

        That an actor is away is told once for all who call it (`away.Absence`).
        """
        if type(error) in self._told or isinstance(error, ActorUnavailable):
            return
        self._told.add(type(error))
        trace = None if isinstance(error, PolyloraError) else error
        logger.warning("%s: %s: %s; trying again", self._what, type(error).__name__, error, exc_info=trace)

    def over(self) -> None:
        """All is well again: the next error is news."""
        if self._told:
            self._told.clear()
            logger.info("%s: all is well again", self._what)


def backoff_s(first_s: float, max_s: float, factor: float = 2.0) -> Iterator[float]:
    """The seconds to wait before each new try, without end: longer each time, up to `max_s`."""
    wait_s = first_s
    while True:
        yield wait_s
        wait_s = min(factor * wait_s, max_s)


async def repeat(turn: Callable[[], Awaitable[object]], interval_s: float, what: str) -> None:
    """Call `turn` at intervals until cancelled, whatever it raises; `what` names it in the log."""
    troubles = LogOnce(what)
    while True:
        try:
            await turn()
        except Exception as error:  # an error of another process must not end this one
            troubles.met(error)
        else:
            troubles.over()
        await asyncio.sleep(interval_s)


async def retry_forever(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run work that should not end, and begin it again whenever it raises. Returns when it returns, or is cancelled."""
    troubles, pauses_s = LogOnce(_work_name(work)), backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        try:
            return await work()
        except Exception as error:
            if loop.time() - began_s > LONGEST_PAUSE_S:
                troubles.over()
                pauses_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            troubles.met(error)
        await asyncio.sleep(next(pauses_s))


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

    def run_forever(self, *works: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work that ends only with its owner. It is begun again when it raises; `check` tells when it has ended."""
        for work in works:
            task = self.start(retry_forever(work))
            task.set_name(_work_name(work))
            task.add_done_callback(self._end_early)

    def check(self) -> None:
        """Raise RuntimeError if work that should run for ever was cancelled, or has returned: a health check."""
        if self._ended is not None:
            raise RuntimeError(f"{self._ended.get_name()} has ended; it should run as long as the process")

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
            logger.debug("%s failed: %s", _name(task), error)
        else:
            logger.error("%s failed", _name(task), exc_info=error)

    def _end_early(self, task: asyncio.Task[Any]) -> None:
        self._ended = self._ended or task


class SingleFlight(Generic[K, T]):
    """Work that runs once at a time for each key, however many ask for it; its owner's `tasks` run it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._running: dict[K, asyncio.Task[T]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._running

    def __iter__(self) -> Iterator[K]:
        return iter(self._running)

    def task(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """The one that runs for the key, else a new one of `work`. Others wait for it, too: `shield` it."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = self._tasks.start(work())
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return task


def _work_name(work: Callable[[], Coroutine[Any, Any, None]]) -> str:
    function = work.func if isinstance(work, partial) else work
    return getattr(function, "__qualname__", repr(function))


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())
