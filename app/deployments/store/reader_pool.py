"""Threads that read adapters, and the demand for what they read.

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
from app.deployments.store.sources.source_resolution import LOCAL_LANE
from app.engine.scheduling.fair_limiter import FairSemaphore

R = TypeVar("R")

#: Reads at a time: of one lane (`AdapterReader.lane`), of one host with all its lanes, of all hosts. One tenant has at
#: most three quarters of each, and the waiting read of the tenant with the fewest goes first.
MAX_READERS_PER_LANE = 4
MAX_READERS_PER_HOST = 16
MAX_READERS = 128
#: Reads that wait for one lane, host, or thread; the newest of the tenant with most of them gives way.
MAX_WAITING_READS = 20_000
#: Looks at local folders at a time, of all tenants and of one: many, for a network file system may hang, and a look
#: needs no processor.
MAX_LOCATING, MAX_LOCATING_PER_TENANT = 128, 16
#: Combinations that one tenant has made at a time.
MAX_COMBINING_PER_TENANT = 1
#: A read that no caller has asked for during this time is abandoned.
ABANDON_S = 20.0
_CHECK_INTERVAL_S = 1.0
#: Lanes without a network have threads of their own, so that hanging sources cannot delay them.
_LOCAL_LANES = (LOCAL_LANE, "disk", "put", "combine")


class ReaderPool:
    """Reader threads. A lane or host that hangs occupies only its own share of them."""

    def __init__(self) -> None:
        self._remote = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="adapter-fetcher")
        self._local = ThreadPoolExecutor(
            len(_LOCAL_LANES) * MAX_READERS_PER_LANE + MAX_LOCATING, thread_name_prefix="adapter-reader"
        )
        self._lanes: WeakValueDictionary[str, FairSemaphore] = WeakValueDictionary()
        self._hosts: WeakValueDictionary[str, FairSemaphore] = WeakValueDictionary()
        self._all = _semaphore(MAX_READERS)
        self._locating = _semaphore(MAX_LOCATING, MAX_LOCATING_PER_TENANT)

    async def run(self, lane: str, work: Callable[[], R], tenant_id: str, host: str = "") -> R:
        """Run blocking work in a thread, with a limit per lane and per host. Raises QueueFull if too many reads
        wait."""
        most = MAX_COMBINING_PER_TENANT if lane == "combine" else None
        limit = self._lanes.setdefault(lane, _semaphore(MAX_READERS_PER_LANE, most))
        share = self._hosts.setdefault(host or lane, _semaphore(MAX_READERS_PER_HOST))
        async with limit.hold(tenant_id), share.hold(tenant_id):
            if lane in _LOCAL_LANES:
                return await asyncio.get_running_loop().run_in_executor(self._local, work)
            async with self._all.hold(tenant_id):
                return await asyncio.get_running_loop().run_in_executor(self._remote, work)

    async def locate(self, lane: str, work: Callable[[], R], tenant_id: str) -> R:
        """`run` for what only looks at a source: a local folder that hangs holds none of the places of reads."""
        if lane != LOCAL_LANE:
            return await self.run(lane, work, tenant_id)
        async with self._locating.hold(tenant_id):
            return await asyncio.get_running_loop().run_in_executor(self._local, work)

    def close(self) -> None:
        for threads in (self._remote, self._local):
            threads.shutdown(wait=False, cancel_futures=True)


def _semaphore(max_total: int, max_per_tenant: int | None = None) -> FairSemaphore:
    most = max(3 * max_total // 4, 1) if max_per_tenant is None else max_per_tenant
    return FairSemaphore("an adapter's turn to be read", max_total, max_per_tenant=most, max_waiting=MAX_WAITING_READS)


class ReadDemand:
    """Which reads callers still need. `abandon` is called with a source that no caller has asked for during
    `ABANDON_S`, repeatedly until its read ends.
    """

    def __init__(self, clock: Callable[[], float], abandon: Callable[[str], None]) -> None:
        self._clock = clock
        self._abandon = abandon
        self._reading: Counter[str] = Counter()  # source -> reads that run or are queued
        self._waiting: Counter[str] = Counter()  # source -> calls that wait for it
        self._last_asked_s: dict[str, float] = {}  # source -> when a caller that polls last asked for it
        self._tasks = Tasks()
        self._watch: asyncio.Task[None] | None = None

    def ask(self, source: str) -> None:
        """A caller that polls needs this source."""
        self._last_asked_s[source] = self._clock()

    def forget(self, source: str) -> None:
        """The read has succeeded or failed."""
        self._last_asked_s.pop(source, None)

    @contextlib.contextmanager
    def waits_for(self, source: str) -> Iterator[None]:
        """A caller waits for this source while the block runs."""
        self._waiting[source] += 1
        try:
            yield
        finally:
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._waiting[source]
            if source in self._reading:
                self._last_asked_s.setdefault(source, self._clock())

    @contextlib.contextmanager
    def reads(self, source: str) -> Iterator[None]:
        """The source is read while the block runs."""
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
        last_asked_s = self._last_asked_s.get(source, self._clock())
        return source in self._waiting or self._clock() - last_asked_s <= ABANDON_S

    async def _abandon_unwanted(self) -> None:
        """Runs while anything is read."""
        while self._reading:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self._last_asked_s = {
                source: at_s for source, at_s in self._last_asked_s.items() if source in self._reading
            }
            for source in self._last_asked_s:
                if not self._is_wanted(source):
                    self._abandon(source)
