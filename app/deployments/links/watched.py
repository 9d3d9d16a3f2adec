"""A named actor's news, followed for as long as this process lives.

In: an actor with a method that waits for news (`published`). Out: what it said last, read from this process's memory.
An actor that is away costs freshness, never an answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Generic, TypeVar

from app.deployments.links.published import Version
from app.deployments.links.ray_calls import ActorAway, NamedActor
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A watcher asks again after this long without news.
WATCH_TIMEOUT_S = 10.0
#: An actor that is away is asked again after this long.
AWAY_S = 0.5


class Follower:
    """An actor's news, followed for as long as this process lives."""

    def __init__(self, actor: NamedActor, watcher_id: str, method: str = "watch") -> None:
        self._actor = actor
        self._method = method
        self._watcher_id = watcher_id
        self._held: Version | None = None

    async def follow(self) -> None:
        """Runs until cancelled. While the actor is away what was last heard stands."""
        while True:
            try:
                news = await self._actor.call(self._method, self._held, self._watcher_id, WATCH_TIMEOUT_S)
            except (ActorAway, NotReady) as error:  # not ready: it is up, its database is away
                logger.warning("%s; keeping the last table", error)
                await asyncio.sleep(AWAY_S)
                continue
            if news is not None:
                self._take(*news)

    def _take(self, version: Version, news: Any) -> None:
        raise NotImplementedError


class Watched(Follower, Generic[T]):
    """A value that is sent whole."""

    def __init__(self, actor: NamedActor, watcher_id: str, empty: T, method: str = "watch") -> None:
        super().__init__(actor, watcher_id, method)
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
