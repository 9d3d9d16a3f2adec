"""How an ingress reaches engines, placement and the adapter store through Ray.

In: handles and named actors. Out: the `Transport` and `Placer` that the dispatcher works with, and the
registry of adapters, kept current by pushes. Tables are read from this process's memory; an actor that
is away costs freshness, never an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, TypeVar

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from app.deployments.frames import unpack_frame
from app.deployments.placement import PlacementTable
from app.deployments.published import Changes, Version
from app.deployments.ray_calls import NamedActor, unwrapped
from app.deployments.registry.view import Entry, Key, RegistryView
from app.deployments.transport import Frame, ReplicaGone
from app.engine.request import GenerateRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A watcher asks again after this long without news.
WATCH_TIMEOUT_S = 10.0
#: Longest wait for placement's answer before the ingress decides by itself.
ASSIGN_TIMEOUT_S = 0.5


class ServeTransport:
    """`Transport` over the engine deployment's handle."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._engines = engines

    async def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        call: Any = self._engines.frames.options(stream=True).remote(link_id, target_replica_id=replica_id)
        try:
            async for packed in call:
                yield unpack_frame(packed)
        except RayActorError as error:
            raise ReplicaGone(f"replica {replica_id}: {type(error).__name__}") from error
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        result: bool = await self._call(
            replica_id, self._engines.submit.remote(link_id, requests, target_replica_id=replica_id)
        )
        return result

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        await self._call(replica_id, self._engines.abort.remote(request_ids, target_replica_id=replica_id))

    async def drop_adapter(self, replica_id: str, digest: str) -> int:
        result: int = await self._call(
            replica_id, self._engines.drop_adapter.remote(digest, target_replica_id=replica_id)
        )
        return result

    async def stats(self, replica_id: str) -> dict[str, Any]:
        result: dict[str, Any] = await self._call(replica_id, self._engines.stats.remote(target_replica_id=replica_id))
        return result

    async def _call(self, replica_id: str, call: Any) -> Any:
        try:
            return await unwrapped(call)
        except RayActorError as error:
            raise ReplicaGone(f"replica {replica_id}: {type(error).__name__}") from error


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
            except RayActorError as error:
                logger.warning("%s; keeping the last table", type(error).__name__)
                await asyncio.sleep(0.5)
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
        self.view.apply(news.rows, is_first=news.is_first)
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
        except (TimeoutError, RayActorError) as error:
            logger.warning("placement does not answer (%s); deciding from the last table", type(error).__name__)

    async def changed(self, timeout_s: float) -> None:
        await self._watched.changed(timeout_s)

    async def gone(self, replica_id: str) -> None:
        try:
            await self._actor.call("gone", replica_id)
        except RayActorError as error:
            logger.warning("placement is away (%s); it will miss the replica's reports instead", type(error).__name__)
