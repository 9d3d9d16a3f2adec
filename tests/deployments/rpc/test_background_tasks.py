"""Tasks outlive the call that began them, are never lost, and say how they failed."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
from functools import partial

import pytest

from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.deployments.rpc.background_tasks import LogOnce, SingleFlight, Tasks, wait_for_event
from app.engine.errors import ConfigError, NotFound

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST", default="none")


async def fail(error: Exception) -> None:
    raise error


async def test_a_task_runs_in_no_requests_context() -> None:
    tasks = Tasks()
    REQUEST.set("of the caller")

    async def context() -> str:
        return REQUEST.get()

    assert await tasks.start(context()) == "none"
    assert len(tasks) == 0


async def test_a_task_that_nobody_holds_goes_on() -> None:
    tasks, done = Tasks(), asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0)
        done.set()

    tasks.start(work())
    gc.collect()
    async with asyncio.timeout(60):
        await done.wait()


@pytest.mark.parametrize(("error", "level"), [(NotFound("no such adapter"), "DEBUG"), (ValueError("a bug"), "ERROR")])
async def test_a_failure_that_nobody_waits_for_is_in_the_log(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = Tasks()
    with caplog.at_level(logging.DEBUG, "app"):
        task = tasks.start(fail(error))
        await asyncio.wait([task])
        await asyncio.sleep(0)
    (record,) = caplog.records
    assert (record.levelname, record.args is not None and "fail" in str(record.args)) == (level, True)
    assert (record.exc_info is not None) == (level == "ERROR"), "a bug is logged with its trace"
    with pytest.raises(type(error)):
        task.result()


async def test_close_ends_all_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    for _ in range(3):
        tasks.start(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert (len(ended), len(tasks), caplog.records) == (3, 0, [])


async def test_work_for_ever_is_begun_again_whatever_it_meets(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.deployments.rpc.background_tasks.FIRST_PAUSE_S", 0.0)
    tasks, began, lasts = Tasks(), 0, asyncio.Event()

    async def work() -> None:
        nonlocal began
        began += 1
        if began <= 6:
            raise (ValueError, ConfigError)[began % 2](f"number {began}")
        lasts.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING):
        tasks.run_forever(work)
        async with asyncio.timeout(60):
            await lasts.wait()
    tasks.check()
    assert [record.exc_info is not None for record in caplog.records] == [False, True], "each kind is logged once"
    await tasks.close()


@pytest.mark.parametrize("way", ["returns", "is cancelled"])
async def test_work_for_ever_that_ends_fails_the_check(way: str) -> None:
    tasks, gate = Tasks(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        if way == "is cancelled":
            raise asyncio.CancelledError

    async def lasts() -> None:
        await asyncio.Event().wait()

    tasks.run_forever(lasts, partial(work))
    await asyncio.sleep(0)
    tasks.check()
    gate.set()
    for _ in range(4):
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="work has ended"):
        tasks.check()
    await tasks.close()


def test_a_trouble_is_news_again_once_it_was_over(caplog: pytest.LogCaptureFixture) -> None:
    troubles = LogOnce("asking")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            troubles.on_error(ValueError("1"))
        troubles.on_recovery()
        troubles.on_error(ValueError("2"))
        troubles.on_error(ActorUnavailable("away"))  # logged by UnavailableLog
    assert [record.getMessage()[-18:] for record in caplog.records] == [f"Error: {n}; retrying" for n in "12"]


async def test_work_for_a_key_runs_once_at_a_time_however_many_ask() -> None:
    tasks, began = Tasks(), list[str]()
    once: SingleFlight[str, int] = SingleFlight(tasks)

    async def work(key: str) -> int:
        began.append(key)
        await asyncio.sleep(0)
        return began.count(key)

    first, second, other = (once.task(key, lambda key=key: work(key)) for key in "aab")  # type: ignore[misc]
    assert first is second
    assert ("a" in once, "c" in once, sorted(once)) == (True, False, ["a", "b"])
    assert await asyncio.gather(first, other) == [1, 1]
    assert list(once) == []
    assert await once.task("a", lambda: work("a")) == 2, "a finished task is not reused"
    await tasks.close()


@pytest.mark.parametrize("within_s", [60.0, 0.0, -1.0])
async def test_an_event_that_is_set_has_come(within_s: float) -> None:
    event = asyncio.Event()
    event.set()
    assert await wait_for_event(event, within_s)


@pytest.mark.parametrize("within_s", [0.001, 0.0, -1.0])
async def test_an_event_that_is_not_set_times_out(within_s: float) -> None:
    assert not await wait_for_event(asyncio.Event(), within_s)


async def test_a_cancelled_wait_ends_though_the_event_comes_with_it() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for_event(event, 60.0))
    await asyncio.sleep(0)
    event.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
