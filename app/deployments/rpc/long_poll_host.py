"""Long polls: values and tables that one process publishes and others watch.

`publish` completes every watcher's pending call. A watcher's call states the version it has, so the owner can wait
until all watchers have a version; this is how "loaded" can mean that every ingress knows. A value is sent whole; of a
table only the changed rows, in pages. Each watcher gets at most one answer per `floor_s`, with all changes until then.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from app.deployments.rpc.background_tasks import wait_for_event
from app.engine.wire_format import message

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

#: Rows per page: some hundred kilobytes, so that a large table does not block its owner.
MAX_PAGE_ROWS = 5000
#: A watcher that does not poll again within this time after an answer is gone; a change waits for it until then.
WATCHER_GRACE_S = 2.0


@message
class Version(NamedTuple):
    """`epoch` differs between lives of the owner, so that a restart is never mistaken for no change.

    `floor` is a table's at the time of sending (`LongPollTable`). `origin` and `revision` identify the stored data the
    value was made from, where the owner has it elsewhere; they outlive the owner. An incomplete copy of a table has
    revision 0.
    """

    epoch: str
    number: int
    floor: int = 0
    origin: str = ""
    revision: int = 0


class _Publisher:
    """Watchers' versions, and waiting on both sides. One event loop, no threads; `clock` gives seconds.

    The caller sets `revision` before it publishes. Within `grace_s` after creation nothing counts as known to all
    watchers, because those of the owner's last life may not have polled yet. `floor_s` is the least time between two
    answers to one watcher.
    """

    def __init__(self, clock: Callable[[], float], origin: str, grace_s: float, floor_s: float) -> None:
        self._now_s = clock
        self.origin = origin
        self.revision = 0
        self._grace_ends_s = clock() + grace_s
        self._floor_s = floor_s
        self._answered_s: dict[str, float] = {}
        self._version = Version(uuid.uuid4().hex, 0, origin=origin)
        self._changed = asyncio.Event()
        self._known: dict[str, tuple[Version, float]] = {}

    @property
    def epoch(self) -> str:
        """The id of this life of the owner."""
        return self._version.epoch

    @property
    def num_watchers(self) -> int:
        return len(self._live_versions())

    async def wait_until_current(self, timeout_s: float) -> bool:
        """Wait until every live watcher has the current version. False on timeout."""
        target, deadline_s = self._version, self._now_s() + timeout_s
        while self._now_s() < deadline_s:
            if self._now_s() >= self._grace_ends_s and all(
                known.epoch == target.epoch and known.number >= target.number for known in self._live_versions()
            ):
                return True
            await asyncio.sleep(0.002)
        return False

    def _live_versions(self) -> list[Version]:
        """Versions of the live watchers as of their last poll; overdue watchers are forgotten."""
        now_s = self._now_s()
        self._known = {watcher: known for watcher, known in self._known.items() if known[1] > now_s}
        self._answered_s = {watcher: at_s for watcher, at_s in self._answered_s.items() if watcher in self._known}
        return [version for version, _ in self._known.values()]

    def _publish_version(self, by: int) -> None:
        self._version = self._version._replace(number=self._version.number + by, revision=self.revision)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, known: Version | None, watcher_id: str, timeout_s: float) -> bool:
        """Whether there is something the watcher does not have; waits for it."""
        if known is None:
            return await self._wait_for_change(known, watcher_id, timeout_s)
        poll = self._known[watcher_id] = (known, self._now_s() + timeout_s + WATCHER_GRACE_S)
        try:
            return await self._wait_for_change(known, watcher_id, timeout_s)
        finally:  # answered, or cancelled because the watcher is gone
            if self._known.get(watcher_id) is poll:  # otherwise it has polled again
                self._known[watcher_id] = (known, self._now_s() + WATCHER_GRACE_S)

    async def _wait_for_change(self, known: Version | None, watcher_id: str, timeout_s: float) -> bool:
        is_current = known is not None and (known.epoch, known.number) == (self._version.epoch, self._version.number)
        if is_current and not await wait_for_event(self._changed, timeout_s):
            return False
        if self._floor_s:
            await asyncio.sleep(self._answered_s.get(watcher_id, -math.inf) + self._floor_s - self._now_s())
            self._answered_s[watcher_id] = self._now_s()
        return True


class LongPollHost(_Publisher, Generic[T]):
    """A value, sent whole."""

    def __init__(self, value: T, clock: Callable[[], float], *, origin: str = "", floor_s: float = 0.0) -> None:
        super().__init__(clock, origin, 0.0, floor_s)
        self._value = value

    @property
    def current(self) -> tuple[Version, T]:
        return self._version, self._value

    def publish(self, value: T) -> None:
        self._value = value
        self._publish_version(1)

    async def newer(self, known: Version | None, watcher_id: str, timeout_s: float) -> tuple[Version, T] | None:
        """The value once it differs from version `known`; None on timeout."""
        return self.current if await self._wait(known, watcher_id, timeout_s) else None


@message
class Changes(NamedTuple, Generic[K, V]):
    """A page of changes; None marks a removed row. `is_last`: there is no more for now.

    `is_first`: a new snapshot begins. Rows of the old copy that none of its pages lists were removed.
    """

    rows: tuple[tuple[K, V | None], ...]
    is_first: bool
    is_last: bool


class LongPollTable(_Publisher, Generic[K, V]):
    """A table, sent by its changes. Each change has a number; a version is the number of the last change applied.

    `_log` lists (number, key) in order; only a key's newest number counts. Once half of the log is stale, `_compact`
    rewrites it and forgets removals that every watcher knows; `_floor` is the newest of those. A watcher below the
    floor has missed a removal and gets a new snapshot, unless it got its last page since then: a snapshot starts with
    the current rows, and the numbers of its first pages are old.
    """

    def __init__(
        self, clock: Callable[[], float], *, origin: str = "", grace_s: float = 0.0, floor_s: float = 0.0
    ) -> None:
        super().__init__(clock, origin, grace_s, floor_s)
        self._rows: dict[K, tuple[int, V | None]] = {}
        self._log: list[tuple[int, K]] = []
        self._floor = 0

    def get(self, key: K) -> V | None:
        """A row; None if there is none."""
        return self._rows.get(key, (0, None))[1]

    def present_keys(self) -> list[K]:
        """The keys of all rows."""
        return [key for key, (_, value) in self._rows.items() if value is not None]

    def publish(self, changes: Mapping[K, V | None]) -> None:
        if not changes:
            return
        number = self._version.number
        for key, value in changes.items():
            number += 1
            self._rows[key] = (number, value)
            self._log.append((number, key))
        self._publish_version(len(changes))
        if len(self._log) > 2 * len(self._rows) + 1000:
            self._compact()

    async def newer(
        self, known: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[K, V]] | None:
        """A page of changes since version `known`, as soon as there are any; None on timeout."""
        if not await self._wait(known, watcher_id, timeout_s):
            return None
        is_first = known is None or known.epoch != self._version.epoch or max(known.number, known.floor) < self._floor
        after = 0 if is_first or known is None else known.number
        version = self._version._replace(floor=self._floor)
        rows: list[tuple[K, V | None]] = []
        for number, key in self._log[bisect_right(self._log, after, key=lambda item: item[0]) :]:
            newest, value = self._rows.get(key, (0, None))
            if newest != number:
                continue  # changed again later
            if len(rows) == MAX_PAGE_ROWS:
                self._answered_s.pop(watcher_id, None)  # no `floor_s` between the pages of a snapshot
                return version._replace(number=after, revision=0), Changes(tuple(rows), is_first, False)
            rows.append((key, value))
            after = number
        return version, Changes(tuple(rows), is_first, True)

    def _compact(self) -> None:
        min_number = min(
            (version.number for version in self._live_versions() if version.epoch == self._version.epoch), default=0
        )
        forgotten = [key for key, (number, value) in self._rows.items() if value is None and number <= min_number]
        for key in forgotten:
            self._floor = max(self._floor, self._rows.pop(key)[0])
        self._log = sorted(((number, key) for key, (number, _) in self._rows.items()), key=lambda item: item[0])
