"""A tiny OpenAI server for code that runs an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.load_tests.fake_server import FakeServer, serving


@pytest.fixture
def server() -> Iterator[tuple[str, FakeServer]]:
    """(URL ending in /v1, the server), in a thread."""
    found: list[tuple[str, FakeServer]] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with serving() as pair:
            found.append(pair)
            ready.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(120)
    yield found[0]
    loop.call_soon_threadsafe(stopping.set)
    thread.join(120)
    loop.close()
    assert not thread.is_alive()
