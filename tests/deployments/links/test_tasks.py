"""Tasks outlive the call that began them, are never lost, and say how they failed."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging

import pytest

from app.deployments.links.tasks import Tasks
from app.engine.errors import NotFound

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


@pytest.mark.parametrize(("error", "level"), [(NotFound("no such adapter"), "INFO"), (ValueError("a bug"), "ERROR")])
async def test_a_failure_that_nobody_waits_for_is_in_the_log(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = Tasks()
    with caplog.at_level(logging.INFO):
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


async def test_work_that_should_run_for_ever_and_does_not_fails_the_check() -> None:
    tasks, gate = Tasks(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        raise ValueError("a bug")

    async def ends() -> None:
        await gate.wait()

    for early, cause in ((work(), ValueError), (ends(), type(None))):
        tasks, gate = Tasks(), asyncio.Event()
        tasks.run_forever(asyncio.Event().wait(), early)
        await asyncio.sleep(0)
        tasks.check()
        gate.set()
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="has ended") as caught:
            tasks.check()
        assert isinstance(caught.value.__cause__, cause)
        await tasks.close()
