"""Values and tables that one process owns and many watch.

In: new values, given to `publish`. Out: every watcher's pending call returns at once with what is new; a watcher that
was away gets the newest, never a stale one. A watcher that asks for what comes after version v tells the owner that it
holds v. So the owner can wait until everybody holds a version, and "loaded" can mean that every ingress knows. A value
is sent whole; of a table only the rows that changed are sent, in pages. Rule: a watcher is answered at most once in the
owner's floor, however fast values change, and what has changed meanwhile is in that one answer.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from app.deployments.rpc.wait_for_event import wait_for_event
from app.engine.wire_format import message

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

#: Rows of a table that are sent at once: some hundred kilobytes, so that a large table does not hold up its owner.
MAX_PAGE = 5000
#: A watcher whose wait has ended asks again within this time, or is gone.
LATE_S = 1.0


@message
class Version(NamedTuple):
    """`epoch` differs between two lives of the owner, so that a restart is never mistaken for no news.

    `floor` is a table's when this was sent (`LongPollTable`): it is no part of what is held. `origin` and `revision`
    say what the value was made from, where the owner keeps it elsewhere: they outlive the owner. Of an incomplete copy
    of a table the revision is 0.
    """

    epoch: str
    number: int
    floor: int = 0
    origin: str = ""
    revision: int = 0


class _Owner:
    """Who holds which version, and waiting for either side. One event loop, no threads; `clock` gives seconds.

    `revision` is the caller's to set, before it publishes what was made from it. For `grace_s` after it was made
    nothing counts as held by everybody: watchers of the owner's last life may be on their way. `floor_s` is the least
    time between two answers to one watcher.
    """

    def __init__(self, clock: Callable[[], float], origin: str, grace_s: float, floor_s: float) -> None:
        self._now_s = clock
        self.origin = origin
        self.revision = 0
        self._grace_ends_s = clock() + grace_s
        self._floor_s = floor_s
        self._answered_s: dict[str, float] = {}
        self._version = Version(uuid.uuid4().hex, 0, origin=origin)
        self._news = asyncio.Event()
        self._held: dict[str, tuple[Version, float]] = {}

    @property
    def epoch(self) -> str:
        """This life of the owner's."""
        return self._version.epoch

    @property
    def num_watchers(self) -> int:
        """Watchers that have asked lately."""
        return len(self._living())

    async def settled(self, timeout_s: float) -> bool:
        """Wait until every living watcher holds the present version. False if one did not say so in time."""
        target, deadline_s = self._version, self._now_s() + timeout_s
        while self._now_s() < deadline_s:
            if self._now_s() >= self._grace_ends_s and all(
                held.epoch == target.epoch and held.number >= target.number for held in self._living()
            ):
                return True
            await asyncio.sleep(0.002)
        return False

    def _living(self) -> list[Version]:
        """What each watcher held when it last asked; one that should have asked again is gone."""
        now_s = self._now_s()
        self._held = {watcher: held for watcher, held in self._held.items() if held[1] > now_s}
        self._answered_s = {watcher: at_s for watcher, at_s in self._answered_s.items() if watcher in self._held}
        return [version for version, _ in self._held.values()]

    def _advance(self, by: int) -> None:
        self._version = self._version._replace(number=self._version.number + by, revision=self.revision)
        self._news.set()
        self._news = asyncio.Event()

    async def _wait(self, held: Version | None, watcher_id: str, timeout_s: float) -> bool:
        """Whether there is something that the watcher does not hold."""
        if held is not None:
            self._held[watcher_id] = (held, self._now_s() + timeout_s + LATE_S)
        is_current = held is not None and (held.epoch, held.number) == (self._version.epoch, self._version.number)
        if is_current and not await wait_for_event(self._news, timeout_s):
            return False
        if self._floor_s:
            await asyncio.sleep(self._answered_s.get(watcher_id, -math.inf) + self._floor_s - self._now_s())
            self._answered_s[watcher_id] = self._now_s()
        return True


class LongPollHost(_Owner, Generic[T]):
    """A value, sent whole."""

    def __init__(self, value: T, clock: Callable[[], float], *, origin: str = "", floor_s: float = 0.0) -> None:
        super().__init__(clock, origin, 0.0, floor_s)
        self._value = value

    @property
    def current(self) -> tuple[Version, T]:
        return self._version, self._value

    def publish(self, value: T) -> None:
        self._value = value
        self._advance(1)

    async def newer(self, held: Version | None, watcher_id: str, timeout_s: float) -> tuple[Version, T] | None:
        """The newest value as soon as it differs from `get_object`; None when nothing came within the timeout."""
        return self.current if await self._wait(held, watcher_id, timeout_s) else None


@message
class Changes(NamedTuple, Generic[K, V]):
    """Rows to take over; None stands for a row that was removed. `is_last`: there is no more for now.

    `is_first`: a new copy of the table begins. Rows of the old copy that no page has mentioned, once the last page is
    there, were removed.
    """

    rows: tuple[tuple[K, V | None], ...]
    is_first: bool
    is_last: bool


class LongPollTable(_Owner, Generic[K, V]):
    """A table, sent by its changes. Each change has a number; a version is the number of the last one held.

    `_log` lists (number, key) in order; only a key's newest number counts. It is rewritten when half of it
    is stale, and then forgets removals that every watcher knows; `_floor` is the newest of those: whoever
    holds less has missed one and starts anew, unless none was forgotten since its last page: a new copy begins with
    what there is, and the numbers of its first pages are old.
    """

    def __init__(
        self, clock: Callable[[], float], *, origin: str = "", grace_s: float = 0.0, floor_s: float = 0.0
    ) -> None:
        super().__init__(clock, origin, grace_s, floor_s)
        self._rows: dict[K, tuple[int, V | None]] = {}
        self._log: list[tuple[int, K]] = []
        self._floor = 0

    def get(self, key: K) -> V | None:
        """A row as it is now; None if there is none."""
        return self._rows.get(key, (0, None))[1]

    def present(self) -> list[K]:
        """The keys of the rows that there are now."""
        return [key for key, (_, value) in self._rows.items() if value is not None]

    def publish(self, changes: Mapping[K, V | None]) -> None:
        if not changes:
            return
        number = self._version.number
        for key, value in changes.items():
            number += 1
            self._rows[key] = (number, value)
            self._log.append((number, key))
        self._advance(len(changes))
        if len(self._log) > 2 * len(self._rows) + 1000:
            self._rewrite()

    async def newer(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[K, V]] | None:
        """A page of what `get_object` lacks, as soon as there is something; None when nothing came within the timeout."""
        if not await self._wait(held, watcher_id, timeout_s):
            return None
        is_first = held is None or held.epoch != self._version.epoch or max(held.number, held.floor) < self._floor
        after = 0 if is_first or held is None else held.number
        version = self._version._replace(floor=self._floor)
        rows: list[tuple[K, V | None]] = []
        for number, key in self._log[bisect_right(self._log, after, key=lambda item: item[0]) :]:
            newest, value = self._rows.get(key, (0, None))
            if newest != number:
                continue  # changed again later
            if len(rows) == MAX_PAGE:
                self._answered_s.pop(watcher_id, None)  # the rest of a copy is not waited for
                return version._replace(number=after, revision=0), Changes(tuple(rows), is_first, False)
            rows.append((key, value))
            after = number
        return version, Changes(tuple(rows), is_first, True)

    def _rewrite(self) -> None:
        known = min((held.number for held in self._living() if held.epoch == self._version.epoch), default=0)
        forgotten = [key for key, (number, value) in self._rows.items() if value is None and number <= known]
        for key in forgotten:
            self._floor = max(self._floor, self._rows.pop(key)[0])
        self._log = sorted(((number, key) for key, (number, _) in self._rows.items()), key=lambda item: item[0])
