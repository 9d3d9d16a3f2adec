"""From a request to its tokens, whichever replica computes them.

In: `GenerateRequest`s. Out: `TokenChunk`s, in order, each token exactly once. The way down is batcher, assigner, links,
transport; chunks come up through the stream's inbox. A stream whose replica is lost is attempted again from the tokens
that were received, so a caller never notices which replica answers; one that a replica has no room for goes on to
another. Rule: what waits for an adapter is counted and bounded before anything is done for it. A caller that leaves
(disconnect, stop string, timeout: all the same here) aborts its sequence. Ray, HTTP and text are not known here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.stream import Stream
from app.engine.errors import PolyloraError
from app.engine.request import GenerateRequest, RequestUsage, TokenChunk

#: (request, what was consumed): a request has ended (`UsageRecorder.record_usage`).
CountEnded = Callable[[GenerateRequest, RequestUsage], None]


class Batcher(Protocol):
    """Where streams wait to be given to replicas together (`ServeBatcher`)."""

    async def assign(self, stream: Stream) -> None:
        """Give a stream to a replica, among others; why none takes it comes through the stream's inbox."""
        ...


class Dispatcher:
    """All streams of one ingress process, on one event loop."""

    def __init__(
        self, batcher: Batcher, links: ReplicaConnections, cold: ColdStartLimiter, count: CountEnded | None = None
    ) -> None:
        """`count` is told what replicas have computed that died, of requests that no other goes on with."""
        self._count = count
        self._batcher = batcher
        self.links = links
        self.cold = cold

    async def stream(self, request: GenerateRequest, deadline_s: float = math.inf) -> AsyncGenerator[TokenChunk]:
        """Chunks of one request; the last one has a finish reason.

        Raises NotReady, QueueFull, EngineFailure, DeadlineExceeded. Closing the generator aborts the sequence.
        `deadline_s` is a time of the event loop's clock.
        """
        stream = Stream(request, deadline_s)
        self.cold.enter(stream)
        alarm = None
        if deadline_s < math.inf:
            alarm = asyncio.get_running_loop().call_at(deadline_s, stream.inbox.put, stream.late())
        try:
            await self._attempt(stream)
            while not stream.closed:
                item = await stream.inbox.get()
                if isinstance(item, TokenChunk):
                    self.cold.leave(stream)
                    stream.take_chunk(item)
                    yield item
                elif isinstance(item, PolyloraError):
                    raise item
                elif stream.take_loss(item):
                    await self._attempt(stream)
        finally:
            self.cold.leave(stream)
            if alarm is not None:
                alarm.cancel()
            if (unclaimed := stream.unclaimed()) is not None and self._count is not None:
                self._count(replace(request, num_charged=stream.num_charged), unclaimed)
            self.links.end(stream)

    async def close(self) -> None:
        """Stop reading; streams that are still open are left to their callers."""
        await self.links.close()

    async def _attempt(self, stream: Stream) -> None:
        stream.begin_attempt()
        try:
            async with asyncio.timeout_at(stream.deadline_s if stream.deadline_s < math.inf else None):
                await self._batcher.assign(stream)
        except TimeoutError:
            raise stream.late() from None
