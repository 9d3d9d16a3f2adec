"""What this process knows of the service's actors: their tables, kept current by pushes.

In: named actors. Out: values and the registry of adapters as they were last heard of, and the `Placer` that the
dispatcher works with. Tables are read from this process's memory; an actor that is away costs freshness, never an
answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from app.deployments.links.published import Changes, Version
from app.deployments.links.ray_calls import ActorAway, NamedActor
from app.deployments.placement.books import PlacementTable
from app.deployments.registry.view import Entry, Key, RegistryView
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A watcher asks again after this long without news.
WATCH_TIMEOUT_S = 10.0
#: An actor that is away is asked again after this long.
AWAY_S = 0.5
#: Longest wait for placement's answer before the ingress decides by itself.
ASSIGN_TIMEOUT_S = 0.5


class _Follower:
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


class Watched(_Follower, Generic[T]):
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


class WatchedRegistry(_Follower):
    """The registry's table, copied by its changes into `view`. `complete` is set when there is nothing to catch up."""

    def __init__(self, actor: NamedActor, watcher_id: str, on_news: Callable[[], None]) -> None:
        super().__init__(actor, watcher_id)
        self._on_news = on_news
        self.view = RegistryView()
        self.complete = asyncio.Event()

    def _take(self, version: Version, news: Changes[Key, Entry]) -> None:
        self._held = version
        self.view.take(news)
        self._on_news()
        if news.is_last:
            self.complete.set()


class ServePlacer:
    """`Placer` over the placement actor."""

    def __init__(self, actor: NamedActor, watched: Watched[PlacementTable]) -> None:
        self._actor = actor
        self._watched = watched

    @property
    def table(self) -> PlacementTable:
        return self._watched.value

    async def assign(self, digests: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ASSIGN_TIMEOUT_S):
                self._watched.take(*await self._actor.call("assign", digests))
        except (TimeoutError, ActorAway, NotReady) as error:
            logger.warning("placement does not answer (%s); deciding from the last table", str(error) or "too late")

    async def changed(self, timeout_s: float) -> None:
        await self._watched.changed(timeout_s)

    async def gone(self, replica_id: str) -> None:
        try:
            await self._actor.call("gone", replica_id)
        except ActorAway as error:
            logger.warning("%s; placement will miss the replica's reports instead", error)
