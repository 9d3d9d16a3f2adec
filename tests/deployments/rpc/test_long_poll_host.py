"""What is published reaches every watcher once, in order, and the owner knows when."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from app.deployments.rpc import long_poll_host
from app.deployments.rpc.long_poll_host import LongPollHost, LongPollTable, Version


async def test_watchers_get_news_at_once_and_the_owner_knows_when_all_have_it() -> None:
    published = LongPollHost("zero", time.monotonic)
    version, value = await published.newer(None, "w", 1) or (None, None)
    assert value == "zero"
    waiting = asyncio.create_task(published.newer(version, "w", 60))
    await asyncio.sleep(0)
    published.publish("one")
    settled = asyncio.create_task(published.wait_until_current(60))
    news = await waiting
    assert news is not None
    assert news[1] == "one"
    await asyncio.sleep(0.02)
    assert not settled.done(), "it was sent, not yet confirmed"
    following = asyncio.create_task(published.newer(news[0], "w", 60))
    assert await settled
    following.cancel()
    published.publish("two")
    assert not await published.wait_until_current(0.05), "a living watcher that does not ask holds it up"


async def test_a_watcher_that_is_cancelled_as_news_come_is_cancelled() -> None:
    published = LongPollHost("zero", stopped)
    version, _ = published.current
    waiting = asyncio.create_task(published.newer(version, "w", 60))
    await asyncio.sleep(0)
    published.publish("one")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def stopped() -> float:
    """A clock by which no watcher is ever late, however busy the machine is."""
    return 0.0


class Copy:
    """A watcher of a table."""

    def __init__(self, name: str) -> None:
        self.name, self.held = name, None
        self.rows: dict[str, int] = {}
        self.num_received = self.num_starts = 0

    held: Version | None

    async def catch_up(self, table: LongPollTable[str, int], timeout_s: float = 0.0) -> None:
        while not await self.take_page(table, timeout_s):
            pass

    async def take_page(self, table: LongPollTable[str, int], timeout_s: float = 0.0) -> bool:
        """Whether there is no more."""
        news = await table.newer(self.held, self.name, timeout_s)
        if news is None:
            return True
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
        return changes.is_last


@pytest.mark.parametrize("seed", range(4))
async def test_copies_of_a_table_become_equal_to_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll_host, "MAX_PAGE_ROWS", 7)
    draw, now_s = random.Random(seed), [0.0]
    table: LongPollTable[str, int] = LongPollTable(lambda: now_s[0])
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
    assert copies[2].num_received <= 60 + 1000, "a new watcher does not get the whole history"
    now_s[0] += 2 * long_poll_host.WATCHER_GRACE_S  # no watcher polls any more
    assert await table.wait_until_current(60)


async def test_a_new_copy_is_completed_whatever_was_forgotten_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll_host, "MAX_PAGE_ROWS", 100)
    table: LongPollTable[str, int] = LongPollTable(stopped)
    old, new = Copy("old"), Copy("new")
    table.publish({f"k{index}": index for index in range(300)})
    table.publish({"k7": None})
    for number in range(2000):
        table.publish({f"k{200 + number % 50}": number})
        await old.catch_up(table, timeout_s=0.001)
    assert table._floor == 301, "an old removal, known to everybody"
    assert [await new.take_page(table) for _ in range(3)] == [False, False, True]
    assert new.rows == old.rows
    assert (len(new.rows), new.num_starts, new.num_received) == (299, 1, 299)


@pytest.mark.parametrize("seed", range(6))
async def test_removals_between_the_pages_of_a_copy_are_not_missed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll_host, "MAX_PAGE_ROWS", 7)
    draw = random.Random(seed)
    table: LongPollTable[str, int] = LongPollTable(stopped)
    expected: dict[str, int] = {}
    copies = {name: Copy(name) for name in ("often", "slowly", "silent")}
    num_complete = num_floors = 0
    for step in range(4000):
        keys = {f"k{draw.randrange(draw.choice([20, 200]))}" for _ in range(3)}
        changes = {key: None if draw.random() < 0.3 else step for key in keys}
        before = table._floor
        table.publish(changes)
        num_floors += table._floor > before
        for key, value in changes.items():
            expected.pop(key, None)
            if value is not None:
                expected[key] = value
        await copies["often"].catch_up(table, timeout_s=1e-4)
        if draw.random() < 0.7:  # a page at a time, with changes in between
            name = draw.choice(["slowly", "silent"])
            copy = copies[name]
            if await copy.take_page(table, timeout_s=60.0):
                assert copy.rows == expected, name
                num_complete += 1
                table._known.pop(name, None)  # it ends, and one that knows nothing begins
                copies[name] = Copy(name)
            elif name == "silent":
                table._known.pop(name, None)  # away for so long that it no longer counts
    assert copies["often"].num_starts == 1
    assert num_floors > 3
    assert num_complete > 10
    for copy in copies.values():
        await copy.catch_up(table)
        assert copy.rows == expected, copy.name


async def test_a_table_sends_changes_not_itself() -> None:
    table: LongPollTable[int, int] = LongPollTable(time.monotonic)
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
    assert num_pages == 20_000 / long_poll_host.MAX_PAGE_ROWS
    waiting = asyncio.create_task(table.newer(version, "w", 60))
    await asyncio.sleep(0)
    settled = asyncio.create_task(table.wait_until_current(60))
    table.publish({5: 1, 99_999: 2})
    after, changes = await waiting or (None, None)
    assert changes is not None
    assert (changes.rows, changes.is_first, changes.is_last) == (((5, 1), (99_999, 2)), False, True)
    following = asyncio.create_task(table.newer(after, "w", 60))
    assert await settled
    following.cancel()
    other, changes = await LongPollTable[int, int](time.monotonic).newer(after, "w", 1) or (None, None)
    assert changes is not None
    assert changes.is_first, "another life of the owner: nothing held counts"
    assert other != after


async def test_a_watcher_that_holds_another_life_of_the_owner_is_not_settled() -> None:
    """It is on its way to the new table, and serves the old one until then."""
    table: LongPollTable[str, int] = LongPollTable(time.monotonic)
    table.publish({"a": 1})
    assert await table.newer(Version("former", 7), "w", 60.0) is not None
    assert not await table.wait_until_current(0.02)
    news = await table.newer(None, "w", 1.0)
    assert news is not None
    following = asyncio.create_task(table.newer(news[0], "w", 60.0))
    await asyncio.sleep(0)
    assert await table.wait_until_current(60.0)
    following.cancel()


async def test_nothing_is_settled_before_the_watchers_of_the_last_life_had_time_to_come() -> None:
    now_s = [0.0]
    table: LongPollTable[str, int] = LongPollTable(lambda: now_s[0], grace_s=2.0)
    table.publish({"a": 1})
    settled = asyncio.create_task(table.wait_until_current(60.0))
    await asyncio.sleep(0.02)
    assert not settled.done()
    now_s[0] = 2.0
    assert await settled


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_watcher_that_does_not_come_back_is_gone_soon_however_long_it_polls(is_cancelled: bool) -> None:
    now_s = [0.0]
    table: LongPollTable[str, int] = LongPollTable(lambda: now_s[0])
    version, _ = await table.newer(None, "w", 1e6) or (None, None)
    waiting = asyncio.create_task(table.newer(version, "w", 1e6))
    await asyncio.sleep(0)
    now_s[0] = 1000.0
    assert table.num_watchers == 1, "it waits"
    if is_cancelled:  # Ray may cancel the call of a process that is gone
        waiting.cancel()
    table.publish({"a": 1})
    await asyncio.wait([waiting])
    settled = asyncio.create_task(table.wait_until_current(1e6))
    await asyncio.sleep(0.02)
    assert not settled.done(), "it may be busy"
    now_s[0] += long_poll_host.WATCHER_GRACE_S
    assert await settled


async def test_the_end_of_an_old_poll_does_not_end_the_next_one() -> None:
    now_s = [0.0]
    table: LongPollTable[str, int] = LongPollTable(lambda: now_s[0])
    version, _ = await table.newer(None, "w", 1e6) or (None, None)
    polls = [asyncio.create_task(table.newer(version, "w", 1e6)) for _ in range(2)]
    await asyncio.sleep(0)
    polls[0].cancel()  # it was lost on its way, and the watcher has polled again
    await asyncio.wait(polls[:1])
    now_s[0] = 1000.0
    assert table.num_watchers == 1
    polls[1].cancel()


async def test_a_version_says_what_it_was_made_from() -> None:
    table: LongPollTable[int, int] = LongPollTable(time.monotonic, origin="database")
    table.revision = 5
    table.publish(dict.fromkeys(range(long_poll_host.MAX_PAGE_ROWS + 1), 0))
    part, _ = await table.newer(None, "w", 1.0) or (None, None)
    whole, _ = await table.newer(part, "w", 1.0) or (None, None)
    assert part is not None
    assert whole is not None
    assert (part.origin, part.revision, whole.revision) == ("database", 0, 5)
