"""A client that leaves in any moment: what was computed for it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from fastapi import Request

from app.deployments.ingress.http.request_lifecycle import first_event


async def test_a_first_event_without_a_client_closes_the_events() -> None:
    """Its task is cancelled when the event is there, and `run_until_disconnect` has yet to clean up."""
    is_closed, has_come = [False], asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield b"data: 1"
            yield b"data: 2"
        finally:
            is_closed[0] = True

    class Waiting:
        async def receive(self) -> dict[str, Any]:
            try:
                await asyncio.Event().wait()
            finally:
                has_come.set()
                await asyncio.Event().wait()  # it is a while until this ends, as it may be
            raise AssertionError

    source = events()
    asking = asyncio.create_task(first_event(cast(Request, Waiting()), source, asyncio.Event()))
    await has_come.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert is_closed[0]
