"""Dispatcher: a request in, its tokens out, whichever replica computes them.

Each token is delivered exactly once, in order. Requests go down through batcher, router, connections and transport;
chunks come back through the stream's inbox. A stream that loses its replica is attempted again from the tokens received
so far; one that its replica has no room for goes to another. A caller that leaves (disconnect, stop string, timeout)
aborts its sequence. Ray, HTTP and text are unknown here.
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

#: (request, its usage), called when a request has ended (`UsageRecorder.record_usage`).
CountEnded = Callable[[GenerateRequest, RequestUsage], None]


class Batcher(Protocol):
    """Gathers streams so that they are routed together (`ServeBatcher`)."""

    async def assign(self, stream: Stream) -> None:
        """Route a stream, among others; a failure arrives in the stream's inbox."""
        ...


class Dispatcher:
    """All streams of one ingress process, on one event loop."""

    def __init__(
        self, batcher: Batcher, connections: ReplicaConnections, cold: ColdStartLimiter, count: CountEnded | None = None
    ) -> None:
        """`count` records usage computed by dead replicas for requests that no other replica continues."""
        self._count = count
        self._batcher = batcher
        self.connections = connections
        self.cold = cold

    async def stream(
        self, request: GenerateRequest, deadline_s: float = math.inf, on_assigned: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[TokenChunk]:
        """Chunks of one request; the last one has a finish reason. `on_assigned` is called when a replica has it.

        Raises NotReady, QueueFull, EngineFailure, DeadlineExceeded. Closing the generator aborts the sequence.
        `deadline_s` is on the event loop's clock.
        """
        stream = Stream(request, deadline_s)
        self.cold.enter(stream)
        timer = None
        if deadline_s < math.inf:
            timer = asyncio.get_running_loop().call_at(deadline_s, stream.inbox.put, stream.deadline_error())
        try:
            await self._attempt(stream)
            on_assigned()
            while not stream.closed:
                item = await stream.inbox.get()
                if isinstance(item, TokenChunk):
                    self.cold.leave(stream)
                    stream.on_chunk(item)
                    yield item
                elif isinstance(item, PolyloraError):
                    raise item
                elif stream.on_loss(item):
                    await self._attempt(stream)
        finally:
            self.cold.leave(stream)
            if timer is not None:
                timer.cancel()
            if (unbilled := stream.unbilled_usage()) is not None and self._count is not None:
                self._count(replace(request, num_charged=stream.num_charged), unbilled)
            self.connections.end(stream)

    async def close(self) -> None:
        """Stop reading; open streams are left to their callers."""
        await self.connections.close()

    async def _attempt(self, stream: Stream) -> None:
        stream.begin_attempt()
        try:
            async with asyncio.timeout_at(stream.deadline_s if stream.deadline_s < math.inf else None):
                await self._batcher.assign(stream)
        except TimeoutError:
            raise stream.deadline_error() from None
