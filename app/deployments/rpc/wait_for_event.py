"""Waiting for an event, but not for ever.

In: an event, and seconds. Out: whether it came. Rule: a wait that is cancelled ends, also where the event comes in the
same moment (`asyncio.wait_for` of Python 3.11 loses that cancellation, and whoever waits for the task's end waits on).
"""

from __future__ import annotations

import asyncio


async def wait_for_event(event: asyncio.Event, within_s: float) -> bool:
    """Whether `event` is set, or is within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
