"""An actor exits after it has had no watcher for long enough, and not before."""

from __future__ import annotations

import asyncio

import pytest

from app.deployments.rpc import idle_shutdown
from app.deployments.rpc.idle_shutdown import IDLE_TIMEOUT_S, IdleShutdown


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_leaves_once_when_nobody_has_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_shutdown, "CHECK_INTERVAL_S", 0.0)
    now_s, left = 1000.0, 0

    def leave() -> None:
        nonlocal left
        left += 1

    actor = IdleShutdown(leave, lambda: now_s)
    for _ in range(20):
        actor.touch()
        await settle()
        now_s += 0.9 * IDLE_TIMEOUT_S
        await settle()
        assert not left
    now_s += 0.2 * IDLE_TIMEOUT_S
    await settle()
    assert left == 1
    now_s += 10 * IDLE_TIMEOUT_S
    await settle()
    assert left == 1
