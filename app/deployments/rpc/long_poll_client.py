"""Long-poll clients: copies of values and tables that another process publishes (`long_poll_host`).

Values are read from this process's memory. While the owner is down the last value stays: it may be stale, but reads
never fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from app.deployments.rpc.background_tasks import LogOnce, wait_for_event
from app.deployments.rpc.long_poll_host import Changes, Version

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

#: (current version, watcher id, timeout in seconds) -> update, or None on timeout. It may raise anything: the owner or
#: its database may be down, or of another release.
Watch = Callable[[Version | None, str, float], Awaitable[tuple[Version, T] | None]]

#: Timeout of one poll.
WATCH_TIMEOUT_S = 10.0
#: Pause after a poll that failed.
RETRY_S = 0.5


class LongPollClient(Generic[T]):
    """Polls the owner in a loop; subclasses apply the updates."""

    def __init__(self, watch: Watch[T], watcher_id: str) -> None:
        self._watch = watch
        self._watcher_id = watcher_id
        self._version: Version | None = None
        self._changed = asyncio.Event()
        self._log = LogOnce(f"{type(self).__name__} keeps its last state")

    async def follow(self) -> None:
        """Poll until cancelled, whatever the owner does."""
        while True:
            try:
                update = await self._watch(self._version, self._watcher_id, WATCH_TIMEOUT_S)
                if update is not None:
                    self.apply(*update)
                self._on_answer()
            except Exception as error:  # a failing owner must not end its clients
                self._log.on_error(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._log.on_recovery()

    def apply(self, version: Version, update: T) -> None:
        """Apply an update of the owner."""
        try:
            self._apply(update)
        except Exception:
            self._version = None  # it may be applied in part: the next answer must be complete
            raise
        self._version = version
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait for an update, at most this long."""
        await wait_for_event(self._changed, timeout_s)

    def _on_answer(self) -> None:
        """Called when the owner has answered and the answer, if it had changes, was applied."""

    def _apply(self, update: T) -> None:
        raise NotImplementedError


class LongPollValue(LongPollClient[T]):
    """A value that is sent whole."""

    def __init__(self, watch: Watch[T], watcher_id: str, empty: T) -> None:
        super().__init__(watch, watcher_id)
        self.value = empty

    def apply(self, version: Version, update: T) -> None:
        """Apply a value, which may have arrived otherwise (as the answer to a query); an older one is ignored."""
        known = self._version
        if known is None or known.epoch != version.epoch or known.number < version.number:
            super().apply(version, update)

    def _apply(self, update: T) -> None:
        self.value = update


class TableSync(Generic[K, V]):
    """Turns pages of a `LongPollTable` into changes of a copy of it.

    A new snapshot does not list rows that were removed meanwhile. They stay in the copy until the snapshot's last page,
    because later pages may still list them.
    """

    def __init__(self) -> None:
        self._unlisted: set[K] | None = None  # keys of the copy not listed by the snapshot so far; None: no snapshot

    def changes(self, page: Changes[K, V], keys: Callable[[], Iterable[K]]) -> dict[K, V | None]:
        """The changes to apply for this page; None removes a row. `keys` lists the keys of the copy."""
        if page.is_first:
            self._unlisted = set(keys())
        changes = dict(page.rows)
        if self._unlisted is not None:
            self._unlisted.difference_update(changes)
            if page.is_last:
                changes |= dict.fromkeys(self._unlisted)
                self._unlisted = None
        return changes
