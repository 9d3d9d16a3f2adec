"""Background tasks owned by an object, independent of the call that started them.

The owner keeps references, so that tasks are not garbage-collected while they run. Each task has an empty context,
because Serve cancels every task that carries the context of a request when that request ends. Failures are logged. Work
that should run forever is restarted after an error; an error of another process must not end this one. When `close` has
returned, no task runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.engine.errors import PolyloraError

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

#: Failed work is restarted after this long, doubled each time up to the second number.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0


class LogOnce:
    """Logs recurring errors: each kind once until recovery."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged: set[type[BaseException]] = set()

    def on_error(self, error: Exception) -> None:
        """Log an error of a new kind, with its traceback unless it is one of ours, whose message is enough.

        ActorUnavailable is logged once per actor by `UnavailableLog`.
        """
        if type(error) in self._logged or isinstance(error, ActorUnavailable):
            return
        self._logged.add(type(error))
        trace = None if isinstance(error, PolyloraError) else error
        logger.warning("%s: %s: %s; retrying", self._what, type(error).__name__, error, exc_info=trace)

    def on_recovery(self) -> None:
        """Work succeeds again: log it, and log the next error."""
        if self._logged:
            self._logged.clear()
            logger.info("%s: recovered", self._what)


def call_in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """The result of a call that may hang, in a thread of its own that does not keep the process from ending."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # whoever gives it up cannot cancel it

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # raised by the caller if it still waits
            answer.set_exception(error)

    threading.Thread(target=run, name="may-hang", daemon=True).start()
    return answer


def backoff_s(first_s: float, max_s: float, factor: float = 2.0) -> Iterator[float]:
    """Endless pauses before retries: longer each time, up to `max_s`."""
    wait_s = first_s
    while True:
        yield wait_s
        wait_s = min(factor * wait_s, max_s)


async def repeat(
    turn: Callable[[], Awaitable[object]], interval_s: float, what: str, *, first_after_s: float | None = None
) -> None:
    """Call `turn` at intervals until cancelled, whatever it raises; `what` names it in the log.

    The first call is after `first_after_s`, by default an interval.
    """
    log = LogOnce(what)
    await asyncio.sleep(interval_s if first_after_s is None else first_after_s)
    while True:
        try:
            await turn()
        except Exception as error:  # an error of another process must not end this one
            log.on_error(error)
        else:
            log.on_recovery()
        await asyncio.sleep(interval_s)


async def retry_forever(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run endless work and restart it whenever it raises. Returns when the work returns or is cancelled."""
    log, pauses_s = LogOnce(_work_name(work)), backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        try:
            return await work()
        except Exception as error:
            if loop.time() - began_s > LONGEST_PAUSE_S:
                log.on_recovery()
                pauses_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            log.on_error(error)
        await asyncio.sleep(next(pauses_s))


async def wait_for_event(event: asyncio.Event, within_s: float) -> bool:
    """Whether `event` is set now or within `within_s` seconds.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with the event.
    """
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Tasks:
    """The tasks of one owner, on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Task[Any] | None = None  # the first task of `run_forever` that ended

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in the background. If several wait for the task, each should `shield` it."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(self._end)
        return task

    def run_forever(self, *works: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work that ends only with its owner. It is restarted when it raises; `check` detects that it has ended."""
        for work in works:
            task = self.start(retry_forever(work))
            task.set_name(_work_name(work))
            task.add_done_callback(self._end_early)

    def check(self) -> None:
        """Health check: raise RuntimeError if work that should run forever was cancelled or has returned."""
        if self._ended is not None:
            raise RuntimeError(f"{self._ended.get_name()} has ended; it should run as long as the process")

    def cancel(self) -> None:
        """Cancel every task without waiting."""
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        """Cancel every task and wait until the last has ended."""
        running = list(self._running)
        self.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PolyloraError):  # expected; the waiting caller gets it
            logger.debug("%s failed: %s", _name(task), error)
        else:
            logger.error("%s failed", _name(task), exc_info=error)

    def _end_early(self, task: asyncio.Task[Any]) -> None:
        self._ended = self._ended or task


class SingleFlight(Generic[K, T]):
    """Work that runs at most once at a time for each key, however many callers need it; `tasks` runs it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._running: dict[K, asyncio.Task[T]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._running

    def __iter__(self) -> Iterator[K]:
        return iter(self._running)

    def task(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """The running task of the key, or a new one of `work`. Others may wait for it, so `shield` it."""
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
