"""Bounds that tenants share: who is admitted, who waits and who gives way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.errors import QueueFull
from app.engine.scheduling.fair_limiter import FairLimiter, FairSemaphore, SharedFairLimiter
from tests.budgets import examples

K = TypeVar("K", bound=Hashable)
TENANTS = st.sampled_from(["a", "b", "c", "d"])


def test_the_newest_entries_of_the_tenant_with_most_give_way() -> None:
    limiter: FairLimiter[str] = FairLimiter("the limit", 512)
    for number in range(8):
        assert limiter.add(f"flood{number}", "flood", 64) == []
    with pytest.raises(QueueFull, match="the limit is 512, which is reached; 512 are in use by this project"):
        limiter.add("flood8", "flood", 64)
    assert gave_way(limiter, "victim", "victim") == ["flood7"]
    assert gave_way(limiter, "large", "other", 100) == ["flood6"]
    with pytest.raises(QueueFull, match="1 are in use by this project"):
        limiter.add("too much", "victim", 300)
    assert list(limiter.entries_of("flood")) == [f"flood{number}" for number in range(6)], "a refusal changes nothing"
    assert limiter.add("resumed", "flood", 64, is_forced=True) == []
    assert limiter.num_used == 7 * 64 + 1 + 100


def gave_way(limiter: FairLimiter[K], key: K, tenant: str, size: int = 1) -> list[K]:
    """Add an entry; those that gave way."""
    return [old for old, error in limiter.add(key, tenant, size) if "is reached" in str(error)]


def test_an_entry_above_the_limit_is_refused_and_removing_is_idempotent() -> None:
    limiter: FairLimiter[str] = FairLimiter("the limit", 10)
    with pytest.raises(QueueFull, match="0 are in use by this project"):
        limiter.add("large", "a", 11)
    assert limiter.add("whole", "a", 10) == []
    limiter.remove("whole")
    limiter.remove("whole")
    assert (limiter.num_used, len(limiter)) == (0, 0)


def test_threads_add_what_fits_and_a_release_counts_from_the_next_entry_on() -> None:
    limiter: SharedFairLimiter[int] = SharedFairLimiter("the limit", 100)

    def add_and_release(first: int) -> int:
        num_refused = 0
        for key in range(first, first + 200):
            try:
                assert limiter.add(key, "a") == []
            except QueueFull:
                num_refused += 1
            else:
                limiter.release(key, key)
        return num_refused

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(add_and_release, range(0, 800, 200))) == 0, "few are here at a time"
    limiter.release(-1)
    assert limiter.add(800, "a") == []
    assert list(limiter.entries_of("a")) == [800]
    assert limiter.add(801, "a", 99) == []
    with pytest.raises(QueueFull):
        limiter.add(802, "a")
    limiter.release(800)
    assert limiter.add(802, "a") == []


Step = tuple[str, int, bool]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(TENANTS, st.integers(1, 5), st.booleans()), max_size=60))
def test_any_sequence_of_entries_is_bounded_and_fair(max_total: int, steps: list[Step]) -> None:
    limiter: FairLimiter[int] = FairLimiter("the limit", max_total)
    entries: dict[int, tuple[str, int]] = {}  # what must be in the limiter, in order of arrival
    for key, (tenant, size, is_removal) in enumerate(steps):
        if is_removal and entries:
            old = list(entries)[size % len(entries)]
            limiter.remove(old)
            del entries[old]
            continue
        expected = those_that_give_way(entries, tenant, size, max_total)
        if expected is None:
            with pytest.raises(QueueFull):
                limiter.add(key, tenant, size)
        else:
            assert gave_way(limiter, key, tenant, size) == expected
            for old in expected:
                del entries[old]
            entries[key] = (tenant, size)
            assert used(entries).total() <= max_total
        assert limiter.num_used == used(entries).total()
        for each in "abcd":
            assert limiter.used_by(each) == used(entries)[each]
            assert list(limiter.entries_of(each)) == [k for k, (owner, _) in entries.items() if owner == each]


def those_that_give_way(
    entries: dict[int, tuple[str, int]], tenant: str, size: int, max_total: int
) -> list[int] | None:
    """The rule, one entry at a time; None: the newcomer is refused."""
    left, gone = dict(entries), list[int]()
    while used(left).total() + size > max_total:
        counts = used(left)
        greediest = [each for each in counts if counts[each] == max(counts.values())]
        if not left or counts[tenant] + size >= max(counts.values()):
            return None
        newest = max(key for key, (owner, _) in left.items() if owner == min(greediest))
        gone.append(newest)
        del left[newest]
    return gone


def used(entries: dict[int, tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for tenant, size in entries.values():
        total[tenant] += size
    return total


class Calls:
    """Calls that hold a semaphore until they are ended."""

    def __init__(self, semaphore: FairSemaphore) -> None:
        self.semaphore = semaphore
        self.admitted: list[str] = []  # in order
        self.holding: dict[str, str] = {}  # call -> tenant
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, name: str, tenant: str) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name, tenant))

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def _hold(self, name: str, tenant: str) -> None:
        async with self.semaphore.hold(tenant):
            self.admitted.append(name)
            self.holding[name] = tenant
            try:
                await self._ends[name].wait()
            finally:
                del self.holding[name]

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.semaphore._num_held, len(self.semaphore._waiting)) == (0, 0)
        assert (self.semaphore._held, self.semaphore._turns) == ({}, {})


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_waiting_calls_are_served_in_turn_whoever_has_more_of_them() -> None:
    calls = Calls(FairSemaphore("seats", 1))
    for number in range(6):
        calls.start(f"flood{number}", "flood")
    await settle()
    for number in range(2):
        calls.start(f"victim{number}", "victim")
    await settle()
    for number in range(8):
        await calls.end(calls.admitted[number])
    assert calls.admitted == [
        *("flood0", "flood1", "victim0", "flood2", "victim1", "flood3", "flood4", "flood5"),
    ]
    await calls.close()


async def test_the_tenant_that_holds_least_goes_first_and_none_holds_more_than_its_share() -> None:
    calls = Calls(FairSemaphore("seats", 4, max_per_tenant=3))
    for number in range(9):
        calls.start(f"flood{number}", "flood")
    await settle()
    assert calls.admitted == ["flood0", "flood1", "flood2"]
    calls.start("victim", "victim")
    await settle()
    assert "victim" in calls.holding, "at once: the flood waits for itself only"
    calls.start("other", "other")
    await settle()
    await calls.end("flood0")
    assert "other" in calls.holding
    await calls.end("victim")
    assert "flood3" in calls.holding
    await calls.close()


async def test_the_newest_waiting_call_of_the_tenant_with_most_gives_way() -> None:
    calls = Calls(FairSemaphore("seats", 1, max_waiting=3))
    for number in range(4):
        calls.start(f"flood{number}", "flood")
    await settle()
    calls.start("victim", "victim")
    await settle()
    with pytest.raises(QueueFull, match="calls that wait for seats is 3"):
        await calls.tasks["flood3"]
    await calls.end("flood0")
    await calls.end("flood1")
    assert calls.admitted == ["flood0", "flood1", "victim"]
    await calls.close()


async def test_without_a_queue_a_call_is_refused_at_once() -> None:
    semaphore = FairSemaphore("uploads", 2, max_per_tenant=1, max_waiting=0)
    async with semaphore.hold("a"):
        with pytest.raises(QueueFull, match="uploads: the limit is 2 at a time, 1 for one project"):
            async with semaphore.hold("a"):
                raise AssertionError
        async with semaphore.hold("b"):
            assert semaphore.held_by("b") == 1
    assert semaphore._num_held == 0


async def test_a_call_that_is_cancelled_as_it_is_admitted_gives_its_place_back() -> None:
    calls = Calls(FairSemaphore("seats", 1))
    calls.start("first", "a")
    calls.start("second", "b")
    await settle()
    calls.tasks["first"].cancel()
    await asyncio.sleep(0)
    calls.tasks["second"].cancel()
    await settle()
    calls.start("third", "c")
    await settle()
    assert list(calls.holding) == ["third"]
    await calls.close()


CALL = st.tuples(st.just("start"), TENANTS, st.just(0))
END = st.tuples(st.sampled_from(["end", "cancel", "tick"]), st.just(""), st.integers(0, 100))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 5), st.lists(st.one_of(CALL, END), max_size=40))
def test_any_sequence_of_calls_keeps_the_bounds_and_loses_no_place(
    max_total: int, max_per_tenant: int, max_waiting: int, steps: list[tuple[str, str, int]]
) -> None:
    async def play() -> None:
        semaphore = FairSemaphore("seats", max_total, max_per_tenant=max_per_tenant, max_waiting=max_waiting)
        calls = Calls(semaphore)
        for number, (deed, tenant, index) in enumerate(steps):
            live = [name for name, task in calls.tasks.items() if not task.done()]
            if deed == "start":
                calls.start(f"{tenant}{number}", tenant)
            elif deed == "cancel" and live:
                calls.tasks[live[index % len(live)]].cancel()
            elif deed == "end" and calls.holding:
                calls._ends[list(calls.holding)[index % len(calls.holding)]].set()
            else:
                await asyncio.sleep(0)
            held = Counter(calls.holding.values())
            assert held.total() <= max_total
            assert max(held.values(), default=0) <= max_per_tenant
            assert len(semaphore._waiting) <= max_waiting
        await settle()
        while calls.holding:
            for name in list(calls.holding):
                await calls.end(name)
        assert len(semaphore._waiting) == 0, "a waiting call was forgotten"
        await calls.close()

    asyncio.run(play())
