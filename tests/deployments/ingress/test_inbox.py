"""A reader gets everything once, in order, however it is interrupted."""

from __future__ import annotations

import asyncio
import random

from app.deployments.ingress.dispatch.stream import SingleReaderQueue


async def test_everything_arrives_once_and_in_order() -> None:
    rng = random.Random(0)
    inbox: SingleReaderQueue[int] = SingleReaderQueue()
    got: list[int] = []

    async def read() -> None:
        while True:
            got.append(await inbox.get())

    reader = asyncio.create_task(read())
    for number in range(2000):
        inbox.put(number)
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            await asyncio.sleep(0)
        if rng.random() < 0.1:  # a reader that leaves takes nothing with it
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            reader = asyncio.create_task(read())
    while len(inbox):
        await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert got == list(range(2000))


async def test_a_reader_waits_until_there_is_something() -> None:
    inbox: SingleReaderQueue[str] = SingleReaderQueue()
    reader = asyncio.ensure_future(inbox.get())
    await asyncio.sleep(0)
    assert not reader.done()
    inbox.put("a")
    inbox.put("b")
    assert await reader == "a"
    assert (len(inbox), await inbox.get()) == (1, "b")
