"""A copy of what another process publishes, kept current for as long as this process lives.

In: a call that waits for news (`published`). Out: the newest value, read from this process's memory. While the owner is
away the last value stands: that costs freshness, never an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from app.deployments.links.published import Version
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: (version that is held, who asks, longest wait in seconds) -> news, or None when nothing came in time. Raises NotReady
#: while the owner, or its database, is away.
Watch = Callable[[Version | None, str, float], Awaitable[tuple[Version, T] | None]]

#: A watcher asks again after this long without news.
WATCH_TIMEOUT_S = 10.0
#: An actor that is away is asked again after this long.
AWAY_S = 0.5


class Follower(Generic[T]):
    """Asks for news without end."""

    def __init__(self, watch: Watch[T], watcher_id: str) -> None:
        self._watch = watch
        self._watcher_id = watcher_id
        self._held: Version | None = None

    async def follow(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                news = await self._watch(self._held, self._watcher_id, WATCH_TIMEOUT_S)
            except NotReady as error:
                logger.warning("%s; keeping the last table", error)
                await asyncio.sleep(AWAY_S)
                continue
            if news is not None:
                self._take(*news)

    def _take(self, version: Version, news: T) -> None:
        raise NotImplementedError


class Watched(Follower[T]):
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
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return

    def _take(self, version: Version, news: T) -> None:
        self.take(version, news)
