"""Health checks that are held back while the replica is healthy."""

from __future__ import annotations

import asyncio

import pytest

from app.deployments.rpc.health_check import HealthCheck

#: A call that is held for `LONG_S` does not end within `LIMIT_S`.
LONG_S, LIMIT_S = 600.0, 60.0


class Replica:
    """What a health check looks at."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


async def test_the_first_call_is_answered_at_once() -> None:
    async with asyncio.timeout(LIMIT_S):
        await HealthCheck(Replica().check, LONG_S).answer()


async def test_later_calls_are_held() -> None:
    health = HealthCheck(Replica().check, 0.05)
    await health.answer()
    clock = asyncio.get_running_loop().time
    for _ in range(2):
        began_s = clock()
        await health.answer()
        assert clock() - began_s >= 0.04


async def test_a_failure_ends_a_held_call() -> None:
    replica = Replica()
    health = HealthCheck(replica.check, LONG_S)
    await health.answer()
    held = asyncio.create_task(health.answer())
    await asyncio.sleep(0.01)
    assert not held.done()
    replica.failure = RuntimeError("the engine has failed")
    health.fail()
    with pytest.raises(RuntimeError, match="the engine has failed"):
        await asyncio.wait_for(held, LIMIT_S)


async def test_a_failed_replica_fails_every_call_at_once() -> None:
    replica = Replica()
    replica.failure = RuntimeError("the engine has failed")
    health = HealthCheck(replica.check, LONG_S)
    for _ in range(3):
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RuntimeError):
                await health.answer()


async def test_a_failure_without_notice_is_found_when_the_held_call_ends() -> None:
    replica = Replica()
    health = HealthCheck(replica.check, 0.02)
    await health.answer()
    held = asyncio.create_task(health.answer())
    await asyncio.sleep(0)
    replica.failure = RuntimeError("a task has ended")
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(held, LIMIT_S)


async def test_a_call_beside_a_held_one_is_answered_at_once() -> None:
    health = HealthCheck(Replica().check, LONG_S)
    await health.answer()
    held = asyncio.create_task(health.answer())
    await asyncio.sleep(0.01)
    async with asyncio.timeout(LIMIT_S):
        await health.answer()
    assert not held.done()
    held.cancel()


async def test_a_cancelled_call_leaves_the_next_one_held() -> None:
    health = HealthCheck(Replica().check, LONG_S)
    await health.answer()
    lost = asyncio.create_task(health.answer())
    await asyncio.sleep(0.01)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    held = asyncio.create_task(health.answer())
    await asyncio.sleep(0.01)
    assert not held.done()
    held.cancel()
