"""An event is waited for no longer than was said, and a cancellation is never lost."""

from __future__ import annotations

import asyncio

import pytest

from app.deployments.rpc.wait_for_event import wait_for_event


@pytest.mark.parametrize("within_s", [60.0, 0.0, -1.0])
async def test_an_event_that_is_set_has_come(within_s: float) -> None:
    event = asyncio.Event()
    event.set()
    assert await wait_for_event(event, within_s)


@pytest.mark.parametrize("within_s", [0.001, 0.0, -1.0])
async def test_an_event_that_nobody_sets_is_not_waited_for(within_s: float) -> None:
    assert not await wait_for_event(asyncio.Event(), within_s)


async def test_a_cancelled_wait_ends_though_the_event_comes_with_it() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for_event(event, 60.0))
    await asyncio.sleep(0)
    event.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
