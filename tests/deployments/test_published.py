"""What is published reaches every watcher once, in order, and the owner knows when."""

from __future__ import annotations

import asyncio
import random

import pytest

from app.deployments import published
from app.deployments.published import Published, PublishedTable, Version


async def test_watchers_get_news_at_once_and_the_owner_knows_when_all_have_it() -> None:
    published = Published("zero")
    version, value = await published.newer(None, "w", 1) or (None, None)
    assert value == "zero"
    waiting = asyncio.create_task(published.newer(version, "w", 60))
    await asyncio.sleep(0)
    published.publish("one")
    settled = asyncio.create_task(published.settled(60))
    news = await waiting
    assert news is not None
    assert news[1] == "one"
    await asyncio.sleep(0.02)
    assert not settled.done(), "it was sent, not yet confirmed"
    following = asyncio.create_task(published.newer(news[0], "w", 60))
    assert await settled
    following.cancel()
    published.publish("two")
    assert not await published.settled(0.05), "a living watcher that does not ask holds it up"


class Copy:
    """A watcher of a table."""

    def __init__(self, name: str) -> None:
        self.name, self.held = name, None
        self.rows: dict[str, int] = {}
        self.num_received = self.num_starts = 0

    held: Version | None

    async def catch_up(self, table: PublishedTable[str, int]) -> None:
        while (news := await table.newer(self.held, self.name, 0.0)) is not None:
            self.held, changes = news
            self.num_starts += changes.is_first
            if changes.is_first:
                self.rows.clear()
            for key, value in changes.rows:
                self.num_received += 1
                if value is None:
                    self.rows.pop(key, None)
                else:
                    self.rows[key] = value


@pytest.mark.parametrize("seed", range(4))
async def test_copies_of_a_table_become_equal_to_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "MAX_PAGE", 7)
    draw = random.Random(seed)
    table: PublishedTable[str, int] = PublishedTable()
    expected: dict[str, int] = {}
    copies = [Copy("often"), Copy("rarely"), Copy("late")]
    for step in range(3000):
        keys = {f"k{draw.randrange(60)}" for _ in range(draw.randrange(4))}
        changes = {key: None if draw.random() < 0.4 else step for key in keys}
        table.publish(changes)
        for key, value in changes.items():
            expected.pop(key, None)
            if value is not None:
                expected[key] = value
        if draw.random() < 0.3:
            await copies[0].catch_up(table)
            assert copies[0].rows == expected
        if draw.random() < 0.003:
            await copies[1].catch_up(table)
    for copy in copies:
        await copy.catch_up(table)
        assert copy.rows == expected, copy.name
    assert copies[0].num_starts == 1, "who listens gets changes only"
    assert copies[2].num_received <= 60 + 1000, "a new watcher is not told the whole past"
    assert await table.settled(60)


async def test_a_table_sends_changes_not_itself() -> None:
    table: PublishedTable[int, int] = PublishedTable()
    table.publish(dict.fromkeys(range(20000), 0))
    version, changes = await table.newer(None, "w", 1) or (None, None)
    num_pages = 1
    assert changes is not None
    assert changes.is_first
    while not changes.is_last:
        version, changes = await table.newer(version, "w", 1) or (None, None)
        assert changes is not None
        assert not changes.is_first
        num_pages += 1
    assert num_pages == 20_000 / published.MAX_PAGE
    waiting = asyncio.create_task(table.newer(version, "w", 60))
    await asyncio.sleep(0)
    settled = asyncio.create_task(table.settled(60))
    table.publish({5: 1, 99_999: 2})
    after, changes = await waiting or (None, None)
    assert changes is not None
    assert (changes.rows, changes.is_first, changes.is_last) == (((5, 1), (99_999, 2)), False, True)
    following = asyncio.create_task(table.newer(after, "w", 60))
    assert await settled
    following.cancel()
    other, changes = await PublishedTable[int, int]().newer(after, "w", 1) or (None, None)
    assert changes is not None
    assert changes.is_first, "another life of the owner: nothing held counts"
    assert other != after
