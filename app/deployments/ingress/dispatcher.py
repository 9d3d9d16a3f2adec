"""From an admitted request to its tokens, whichever replica computes them.

In: `GenerateRequest`s and a placement table. Out: `TokenChunk`s, in order, each token exactly once.
One link per replica: a long-lived reader of frames (one frame per engine step, chunks of all our
streams) and one `submit` call per group of requests that were placed together. When a link breaks, its
streams are placed again from the tokens already received, so a caller never notices which replica
answers. What a replica has no room for goes on to another; it is refused once each has refused it. A caller
that leaves (disconnect, stop string, timeout: all the same here) aborts its sequence.
Ray is behind the `Transport`; HTTP and text are not known here.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from app.deployments.ingress.streams import Link, Lost, Refused, Stream
from app.deployments.links.transport import (
    EngineFailed,
    ReplicaGone,
    ReplicaLeaving,
    ReplicaUnreachable,
    Transport,
)
from app.deployments.placement.placer import Placer
from app.deployments.placement.policies.policy import PlacementPolicy, choose_replica
from app.engine.errors import AdapterKeptOut, DeadlineExceeded, EngineFailure, NotReady, QueueFull
from app.engine.request import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)

#: A request that was on this many replicas when they died is blamed for it. Those that drain do not count, nor do those
#: whose engine failed: who is to blame for that is found out (`trials`).
MAX_LOSSES = 4
#: A replica that could not be reached is left alone for this long.
AVOID_S = 0.5
ATTACH_TIMEOUT_S = 10.0


class Dispatcher:
    """All streams of one ingress process. `admit` is where requests wait to be placed together."""

    def __init__(
        self,
        transport: Transport,
        placer: Placer,
        policy: PlacementPolicy,
        *,
        admit: Callable[[Stream], Awaitable[Exception | None]] | None = None,
        replica_wait_s: float = 30.0,
    ) -> None:
        self._transport = transport
        self._placer = placer
        self._policy = policy
        self._admit = admit or self._place_alone
        self.replica_wait_s = replica_wait_s
        self._links: dict[str, Link] = {}
        self._inflight: dict[str, int] = {}
        self._avoid_until_s: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_streams(self) -> int:
        return sum(len(link.streams) for link in self._links.values())

    def usable_loads(self) -> dict[str, int]:
        """Requests in flight per usable replica: our own, plus what others had there when it last reported."""
        now_s = time.monotonic()
        return {
            replica_id: max(self._inflight.get(replica_id, 0), report.load)
            for replica_id, report in self._placer.table.replicas.items()
            if self._avoid_until_s.get(replica_id, 0.0) <= now_s
        }

    async def stream(self, request: GenerateRequest, deadline_s: float = math.inf) -> AsyncGenerator[TokenChunk]:
        """Chunks of one request; the last one has a finish reason.

        Raises NotReady, QueueFull, EngineFailure, DeadlineExceeded. Closing the generator aborts the sequence.
        `deadline_s` is a time of the event loop's clock.
        """
        stream = Stream(request, deadline_s)
        alarm = None
        if deadline_s < math.inf:
            alarm = asyncio.get_running_loop().call_at(deadline_s, stream.inbox.put, stream.late())
        try:
            await self._place(stream)
            while not stream.closed:
                item = await stream.inbox.get()
                if isinstance(item, TokenChunk):
                    stream.received.extend(item.token_ids)
                    stream.closed = item.finish_reason is not None
                    yield item
                elif isinstance(item, DeadlineExceeded):
                    raise item
                elif item.placement == stream.placement:
                    if isinstance(item, Refused):
                        stream.refusals[item.replica_id] = item.error
                    else:
                        stream.num_losses += item.died
                        stream.num_failures += item.failed
                        stream.refusals.clear()
                    await self._place(stream)
        finally:
            if alarm is not None:
                alarm.cancel()
            self._close(stream)

    async def place(self, streams: Sequence[Stream]) -> list[Exception | None]:
        """Place requests that arrived together: one decision, one call per replica. None means placed.

        A replica that had no room for a request is not asked again; if it was the last, its refusal is the answer.
        Nobody waits for a replica that is slow to answer: what becomes of its group each stream hears through its
        inbox, and if the replica turns out to be gone it asks again.
        """
        try:
            loads = await self._wait_for_replicas()
        except NotReady as error:
            return [error for _ in streams]
        wanted = {s.request.adapter.digest for s in streams if s.request.adapter and not s.closed}
        if self._policy.has_homes and (unknown := wanted.difference(self._placer.table.homes)):
            await self._placer.assign(sorted(unknown))
        groups: dict[str, list[Stream]] = {}
        errors: list[Exception | None] = [None for _ in streams]
        for index, stream in enumerate(streams):
            if stream.closed:
                continue
            digest = stream.request.adapter.digest if stream.request.adapter else None
            untried = {replica_id: load for replica_id, load in loads.items() if replica_id not in stream.refusals}
            replica_id = choose_replica(digest, self._placer.table, untried, self._policy)
            if replica_id is None:
                errors[index] = next(reversed(stream.refusals.values()))
                continue
            loads[replica_id] += 1
            groups.setdefault(replica_id, []).append(stream)
        for replica_id, group in groups.items():
            self._count(replica_id, len(group))
            self._spawn(self._submit(replica_id, group))
        return errors

    async def close(self) -> None:
        """Stop reading; streams still open are left to their callers."""
        for link in list(self._links.values()):
            if link.reader is not None:
                link.reader.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _place_alone(self, stream: Stream) -> Exception | None:
        return (await self.place([stream]))[0]

    async def _place(self, stream: Stream) -> None:
        if stream.num_losses >= MAX_LOSSES:
            raise EngineFailure(
                f"request {stream.request.request_id} lost {MAX_LOSSES} replicas, which died with it; giving up on it"
            )
        stream.placement += 1
        try:
            async with asyncio.timeout_at(stream.deadline_s if stream.deadline_s < math.inf else None):
                error = await self._admit(stream)
        except TimeoutError:
            raise stream.late() from None
        if error is not None:
            raise error

    async def _wait_for_replicas(self) -> dict[str, int]:
        deadline_s = time.monotonic() + self.replica_wait_s
        while not (loads := self.usable_loads()):
            if time.monotonic() >= deadline_s:
                raise NotReady(f"no engine replica became ready within {self.replica_wait_s:g} s", retry_after_s=5)
            await self._placer.changed(AVOID_S / 2)
        return loads

    async def _submit(self, replica_id: str, group: list[Stream]) -> None:
        """Give one replica its group, which is counted there. Whatever goes wrong, every stream hears of it."""
        placements = [(stream, stream.placement) for stream in group]
        num_counted = len(group)
        try:
            link = await self._attached_link(replica_id)
            for stream in group:
                stream.link, stream.submitting = link, True
                link.streams[stream.placement_id] = stream
            num_counted = 0  # by their links from here on
            requests = [stream.placed_request() for stream in group if not stream.closed]
            if not await self._transport.submit(replica_id, link.link_id, requests):
                self._drop(link)
                self._lose(placements)
        except EngineFailed:
            # The reader hears it, too, behind the tokens that came before, from which the others go on.
            self._leave_alone(replica_id)
            self._lose(placements)
        except (ReplicaGone, ReplicaUnreachable) as error:
            self._avoid(replica_id, error)
            self._lose(placements)  # unless they went with the link
        except Exception as error:
            for stream, placement in placements:
                if stream.placement == placement:
                    stream.inbox.put(TokenChunk(stream.placement_id, finish_reason="error", error=error))
                    self._forget(stream)
        self._count(replica_id, -num_counted)
        for stream, placement in placements:
            if stream.placement == placement:
                stream.submitting = False
                if stream.closed:
                    self._close(stream)

    async def _attached_link(self, replica_id: str) -> Link:
        """The link that is read at this moment; one that ended while we waited is not it."""
        while True:
            link = self._links.get(replica_id)
            if link is None:
                link = Link(replica_id, asyncio.get_running_loop().create_future())
                self._links[replica_id] = link
                link.reader = self._spawn(self._read(link))
            await asyncio.wait([link.attached], timeout=ATTACH_TIMEOUT_S)
            if not link.attached.done():
                raise ReplicaUnreachable(f"{replica_id} did not attach within {ATTACH_TIMEOUT_S:g} s")
            link.attached.result()
            if self._links.get(replica_id) is link:
                return link

    async def _read(self, link: Link) -> None:
        """Deliver frames until the link ends, then tell every stream that still waits on it."""
        try:
            async for frame in self._transport.frames(link.replica_id, link.link_id):
                if not link.attached.done():
                    link.attached.set_result(None)
                for chunk in frame:
                    self._deliver(link, chunk)
        except (ReplicaGone, ReplicaUnreachable) as error:
            self._avoid(link.replica_id, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Not a death we know. The streams are moved all the same; the bug must be seen.
            logger.exception("reading frames of replica %s failed", link.replica_id)
            self._avoid(link.replica_id, ReplicaUnreachable(str(error)))
            self._drop(link, died=True)
        finally:
            self._drop(link)

    def _deliver(self, link: Link, chunk: TokenChunk) -> None:
        stream = link.streams.get(chunk.request_id)
        if stream is None:
            return  # closed meanwhile; the abort is on its way
        if isinstance(chunk.error, QueueFull | AdapterKeptOut):
            stream.inbox.put(Refused(stream.placement, link.replica_id, chunk.error))
        else:
            stream.inbox.put(chunk)
        if chunk.finish_reason is not None:
            self._forget(stream)

    def _avoid(self, replica_id: str, error: ReplicaGone | ReplicaUnreachable) -> None:
        """A replica cannot take requests: all are told if it died, leaves or once was ours; else it may be new to us.

        One that merely drains keeps its link: what it still computes is delivered.
        """
        link = self._links.get(replica_id)
        was_attached = link is not None and link.attached.done() and link.attached.exception() is None
        if link is not None and isinstance(error, ReplicaGone):
            failure = error if isinstance(error, EngineFailed) else None
            self._drop(link, died=failure is None and not link.draining, failure=failure)
        elif link is not None:
            link.draining = True
        self._leave_alone(replica_id)
        logger.info("replica %s: %s", replica_id, error)
        if isinstance(error, ReplicaGone | ReplicaLeaving) or was_attached:
            self._spawn(self._placer.gone(replica_id))

    def _leave_alone(self, replica_id: str) -> None:
        self._avoid_until_s = {r: t for r, t in self._avoid_until_s.items() if r in self._placer.table.replicas}
        self._avoid_until_s[replica_id] = time.monotonic() + AVOID_S

    def _lose(
        self, placements: Sequence[tuple[Stream, int]], *, died: bool = False, failure: EngineFailed | None = None
    ) -> None:
        """Have streams placed again, but for the one that is to blame for an engine's failure."""
        for stream, placement in placements:
            if stream.placement != placement:
                continue
            if failure is not None and failure.culprit == stream.placement_id:
                given_up = EngineFailure(
                    f"request {stream.request.request_id} was being computed when {stream.num_failures + 1} engines "
                    "failed, the last time as the only suspect; giving up on it"
                )
                stream.inbox.put(TokenChunk(stream.placement_id, finish_reason="error", error=given_up))
            else:
                failed = failure is not None and stream.placement_id in failure.suspects
                stream.inbox.put(Lost(placement, died and stream.link is not None, failed))
            self._forget(stream)

    def _drop(self, link: Link, *, died: bool = False, failure: EngineFailed | None = None) -> None:
        """End a link once: nobody submits to it any more, and all its streams are placed again."""
        if self._links.get(link.replica_id) is not link:
            return
        del self._links[link.replica_id]
        if not link.attached.done():
            link.attached.set_exception(ReplicaUnreachable(f"replica {link.replica_id} closed the stream"))
            link.attached.exception()  # retrieved: nobody may be waiting
        self._lose([(stream, stream.placement) for stream in link.streams.values()], died=died, failure=failure)
        if link.reader is not None and link.reader is not asyncio.current_task():
            link.reader.cancel()

    def _close(self, stream: Stream) -> None:
        """The caller is done with a stream: if the engine is not, tell it."""
        stream.closed = True
        if stream.link is not None and not stream.submitting:
            self._spawn(self._abort(stream.link.replica_id, stream.placement_id))
            self._forget(stream)

    async def _abort(self, replica_id: str, placement_id: str) -> None:
        with suppress(ReplicaGone, ReplicaUnreachable):  # then there is nothing left to abort
            await self._transport.abort(replica_id, [placement_id])

    def _forget(self, stream: Stream) -> None:
        if stream.link is not None:
            stream.link.streams.pop(stream.placement_id, None)
            self._count(stream.link.replica_id, -1)
            stream.link = None

    def _count(self, replica_id: str, change: int) -> None:
        count = self._inflight.get(replica_id, 0) + change
        if count:
            self._inflight[replica_id] = count
        else:
            self._inflight.pop(replica_id, None)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of our own: an empty context, or Serve cancels it with the request that started it."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
