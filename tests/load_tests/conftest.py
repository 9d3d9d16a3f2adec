"""A tiny OpenAI server for code that runs an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.load_tests.fake_server import FakeServer, serving

#: What every benchmark stands on. The benchmarks themselves serve those who measure, and are tested nightly.
BY_DAY = ("test_report", "test_run", "test_workload", "test_arrivals", "test_popularity", "test_chaos")


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.stem not in BY_DAY:
            item.add_marker(pytest.mark.nightly)


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
