"""A copy of what another process publishes, kept current for as long as this process lives.

In: a call that waits for news (`published`). Out: the newest value, read from this process's memory. While the owner is
away the last value stands: that costs freshness, never an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from app.deployments.rpc.background_tasks import LogOnce
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.rpc.wait_for_event import wait_for_event

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

#: (version that is held, who asks, longest wait in seconds) -> news, or None when nothing came in time. It may raise
#: anything: the owner may be away, or its database, or it may be of another version.
Watch = Callable[[Version | None, str, float], Awaitable[tuple[Version, T] | None]]

#: A watcher asks again after this long without news.
WATCH_TIMEOUT_S = 10.0
#: An owner that did not answer is asked again after this long.
AWAY_S = 0.5


class LongPollClient(Generic[T]):
    """Asks for news without end."""

    def __init__(self, watch: Watch[T], watcher_id: str, timeout_s: float = WATCH_TIMEOUT_S) -> None:
        self._watch = watch
        self._watcher_id = watcher_id
        self._timeout_s = timeout_s
        self._held: Version | None = None
        self._troubles = LogOnce(f"{type(self).__name__} keeps what it has")

    async def follow(self) -> None:
        """Runs until cancelled, whatever the owner does."""
        while True:
            try:
                news = await self._watch(self._held, self._watcher_id, self._timeout_s)
                if news is not None:
                    self._take_all(*news)
            except Exception as error:  # an owner that misbehaves must not end those who read what it said before
                self._troubles.met(error)
                await asyncio.sleep(AWAY_S)
            else:
                self._troubles.over()

    def _take_all(self, version: Version, news: T) -> None:
        try:
            self._take(version, news)
        except Exception:
            self._held = None  # part of it may be missing: the next answer is to be the whole
            raise

    def _take(self, version: Version, news: T) -> None:
        raise NotImplementedError


class LongPollValue(LongPollClient[T]):
    """A value that is sent whole."""

    def __init__(self, watch: Watch[T], watcher_id: str, empty: T) -> None:
        super().__init__(watch, watcher_id)
        self._news = asyncio.Event()
        self.value = empty

    def take(self, version: Version, value: T) -> None:
        """A value that arrived otherwise (as the answer to a question); an older one is ignored."""
        if self._held is not None and self._held.epoch == version.epoch and self._held.number >= version.number:
            return
        self._held, self.value = version, value
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        await wait_for_event(self._news, timeout_s)

    def _take(self, version: Version, news: T) -> None:
        self.take(version, news)


class TableSync(Generic[K, V]):
    """Turns the pages of a `LongPollTable` into changes of a copy of it.

    A new snapshot does not list the rows that were removed meanwhile. They stay in the copy until the snapshot's last
    page, because a row that no page has listed so far may still come.
    """

    def __init__(self) -> None:
        self._unlisted: set[K] | None = None  # rows of the copy that the snapshot has not listed; None: no snapshot

    def changes(self, page: Changes[K, V], held: Callable[[], Iterable[K]]) -> dict[K, V | None]:
        """The changes to apply for this page; None removes a row. `get_object` lists the keys of the copy."""
        if page.is_first:
            self._unlisted = set(held())
        changes = dict(page.rows)
        if self._unlisted is not None:
            self._unlisted.difference_update(changes)
            if page.is_last:
                changes |= dict.fromkeys(self._unlisted)
                self._unlisted = None
        return changes
