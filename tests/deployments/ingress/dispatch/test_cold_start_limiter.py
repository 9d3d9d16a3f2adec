"""Whose requests wait for adapters when not all of them can."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.config import LimitsConfig
from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.stream import Stream
from app.engine.errors import QueueFull
from tests.fakes import fake_adapter, fake_request


class NothingIsResident:
    """A placer whose adapters are on no device."""

    view: Any = None

    def is_resident(self, digest: str) -> bool:  # noqa: ARG002
        return False


PLACER: Any = NothingIsResident()
PLACER.view = PLACER
LIMITS = LimitsConfig(max_pending_requests_per_adapter=6, max_pending_cold_requests=10)
NAMES = iter(range(10_000))


def enter(cold: ColdStartLimiter, tenant: str, adapter: str) -> Stream:
    stream = Stream(fake_request(f"r{next(NAMES)}", [1], fake_adapter(adapter, 8), tenant_id=tenant))
    cold.enter(stream)
    return stream


async def refused(streams: list[Stream]) -> list[Stream]:
    return [stream for stream in streams if await _has_refusal(stream)]


async def _has_refusal(stream: Stream) -> bool:
    try:
        async with asyncio.timeout(0.001):
            return isinstance(await stream.inbox.get(), QueueFull)
    except TimeoutError:
        return False


async def test_who_has_most_waiting_makes_room_for_others() -> None:
    cold = ColdStartLimiter(PLACER, LIMITS)
    flood = [enter(cold, "flood", f"a{index}") for index in range(10)]
    with pytest.raises(QueueFull, match="max_pending_cold_requests is 10"):
        enter(cold, "flood", "another")
    others = [enter(cold, "other", f"b{index}") for index in range(5)]
    with pytest.raises(QueueFull):
        enter(cold, "other", "b5")
    assert {name: cold._pending._total.used_by(name) for name in ("flood", "other")} == {"flood": 5, "other": 5}
    assert await refused(flood) == flood[5:], "those that came last"
    assert await refused(others) == []
    third = enter(cold, "third", "c")
    assert third in cold._timers
    for stream in [*flood, *others, third]:
        cold.leave(stream)
    assert (len(cold._pending._total), cold._pending._groups, cold._timers) == (0, {}, {})


async def test_one_adapter_s_waiters_are_shared_too() -> None:
    cold = ColdStartLimiter(PLACER, LIMITS)
    flood = [enter(cold, "flood", "public") for _ in range(6)]
    with pytest.raises(QueueFull, match="max_pending_requests_per_adapter is 6"):
        enter(cold, "flood", "public")
    enter(cold, "other", "public")
    assert await refused(flood) == flood[5:]
    assert len(cold._pending._total) == 6
