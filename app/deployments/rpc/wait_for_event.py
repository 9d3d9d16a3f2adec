"""Waiting for an event with a timeout.

`asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with the event, and whoever waits for the
task's end then waits forever; this does not.
"""

from __future__ import annotations

import asyncio


async def wait_for_event(event: asyncio.Event, within_s: float) -> bool:
    """Whether `event` is set now or within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
