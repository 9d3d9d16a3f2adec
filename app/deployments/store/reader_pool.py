"""Reads of adapters: how many run at a time, and for how long anybody still wants what they read.

`HostAdapterCache` has one of each class and is their only caller, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from app.deployments.rpc.background_tasks import Tasks

R = TypeVar("R")

#: Adapters read at the same time: from one lane (`Library.lane`), from one host with all its lanes, from all hosts.
MAX_READERS_PER_LANE = 4
MAX_READERS_PER_HOST = 16
MAX_READERS = 128
#: A read that nobody has asked about for so long is given up.
ABANDON_S = 20.0
_CHECK_INTERVAL_S = 1.0
#: Lanes that need no network have threads of their own, however many sources hang.
_LOCAL_LANES = ("local", "disk", "put", "combine")


class ReaderPool:
    """Threads that read. A lane or a host that hangs takes only its own share of them."""

    def __init__(self) -> None:
        self._remote = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="adapter-fetcher")
        self._local = ThreadPoolExecutor(len(_LOCAL_LANES) * MAX_READERS_PER_LANE, thread_name_prefix="adapter-reader")
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, lane: str, work: Callable[[], R], host: str = "") -> R:
        """Run blocking work in a thread, with at most a few at a time of one lane, and of one host."""
        limit = self._lanes.setdefault(lane, asyncio.Semaphore(MAX_READERS_PER_LANE))
        share = self._hosts.setdefault(host or lane, asyncio.Semaphore(MAX_READERS_PER_HOST))
        threads = self._local if lane in _LOCAL_LANES else self._remote
        async with limit, share:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        for threads in (self._remote, self._local):
            threads.shutdown(wait=False, cancel_futures=True)


class ReadDemand:
    """Who wants the sources that are being read. `abandon` is called with a source that nobody has asked about for
    `ABANDON_S`, again and again until its read has ended."""

    def __init__(self, clock: Callable[[], float], abandon: Callable[[str], None]) -> None:
        self._clock = clock
        self._abandon = abandon
        self._reading: Counter[str] = Counter()  # sources that are being read, or wait for their turn
        self._waiting: Counter[str] = Counter()  # sources, and how many calls wait for what is read from them
        self._asked_s: dict[str, float] = {}  # of sources that are being read: when one that does not wait last asked
        self._tasks = Tasks()
        self._watch: asyncio.Task[None] | None = None

    @property
    def sources(self) -> frozenset[str]:
        """Those that are being read, or wait for their turn."""
        return frozenset(self._reading)

    def ask(self, source: str) -> None:
        """Somebody who does not wait wants what is read from this source."""
        self._asked_s[source] = self._clock()

    def forget(self, source: str) -> None:
        """What was asked for has been read, or has failed."""
        self._asked_s.pop(source, None)

    @contextlib.contextmanager
    def waits_for(self, source: str) -> Iterator[None]:
        """Somebody waits for what is read from this source."""
        self._waiting[source] += 1
        try:
            yield
        finally:
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._waiting[source]
            if source in self._reading:
                self._asked_s.setdefault(source, self._clock())

    @contextlib.contextmanager
    def reads(self, source: str) -> Iterator[None]:
        """The source is being read."""
        self._reading[source] += 1
        if self._watch is None or self._watch.done():
            self._watch = self._tasks.start(self._abandon_unwanted())
        try:
            yield
        finally:
            self._reading[source] -= 1
            if not self._reading[source]:
                del self._reading[source]
                self.forget(source)

    def close(self) -> None:
        self._tasks.cancel()

    def _is_wanted(self, source: str) -> bool:
        asked_s = self._asked_s.get(source, self._clock())
        return source in self._waiting or self._clock() - asked_s <= ABANDON_S

    async def _abandon_unwanted(self) -> None:
        """For as long as anything is read."""
        while self._reading:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self._asked_s = {source: at_s for source, at_s in self._asked_s.items() if source in self._reading}
            for source in self._asked_s:
                if not self._is_wanted(source):
                    self._abandon(source)
