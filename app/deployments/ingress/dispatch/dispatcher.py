"""Dispatcher: a request in, its tokens out, whichever replica computes them.

Each token is delivered exactly once, in order. Requests go down through batcher, router, connections and transport;
chunks come back through the stream's inbox. A stream that loses its replica is attempted again from the tokens received
so far; one that its replica has no room for goes to another. A caller that leaves (disconnect, stop string, timeout)
aborts its sequence. Ray, HTTP and text are unknown here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.registry.jobs.failure_backoff import FailureBackoff
from app.engine.errors import AdapterQuarantined, EngineFailure, NotReady, PoisonRequest, PolyloraError, QueueFull
from app.engine.request import GenerateRequest, RequestUsage, TokenChunk, Usage

#: Texts of one caller that are embedded at a time; the rest wait in the caller, not in an engine's queue.
MAX_OPEN_EMBEDDINGS = 64
#: Refusals that are remembered at a time.
MAX_REFUSALS = 4096
#: The longest time for which a refused request is not to be repeated.
MAX_HOLD_S = 8.0
#: Refusals whose answers are held back at a time.
MAX_HELD_BACK = 256

#: (request, its usage), called when a request has ended (`UsageRecorder.record_usage`).
CountEnded = Callable[[GenerateRequest, RequestUsage], None]


class Batcher(Protocol):
    """Gathers streams so that they are routed together (`ServeBatcher`)."""

    async def assign(self, stream: Stream) -> None:
        """Route a stream, among others; a failure arrives in the stream's inbox."""
        ...


class _Refusal(NamedTuple):
    """The sequences of the smallest refused request; it may be repeated at `until_s`, `hold_s` after the refusal."""

    num_sequences: int
    until_s: float
    hold_s: float
    error: QueueFull


class RecentRefusals:
    """Requests for which no engine had room, until they may be repeated.

    Meanwhile the tenant's requests for the same adapter that are at least as large are refused here, and their answers
    are held back until then: a client that repeats them at once costs no work of the engines, little of the ingress,
    and delays no other requests. The time is the error's `Retry-After`, and doubles with each refusal in a row.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[str, str | None], _Refusal] = {}  # by tenant and adapter digest
        self._num_held_back = 0

    def add(self, request: GenerateRequest, num_sequences: int, error: QueueFull) -> None:
        """Record that an engine refused a request of so many sequences."""
        now_s, key = self._clock(), _refusal_key(request)
        if len(self._refused) >= MAX_REFUSALS:
            self._refused = {each: refused for each, refused in self._refused.items() if refused.until_s > now_s}
        before, hold_s = self._refused.get(key), error.retry_after_s
        if before is None:
            if len(self._refused) >= MAX_REFUSALS:
                return
        elif now_s < before.until_s:  # of the same request, or sent before the other was refused
            self._refused[key] = before._replace(num_sequences=min(num_sequences, before.num_sequences))
            return
        elif now_s < before.until_s + before.hold_s:
            hold_s = min(2 * before.hold_s, MAX_HOLD_S)
        self._refused[key] = _Refusal(num_sequences, now_s + hold_s, hold_s, error)

    async def check(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises QueueFull if one as large was refused and is not to be repeated yet, at the time when it may be.

        If `MAX_HELD_BACK` wait for that already, at once.
        """
        for request in requests if self._refused else ():
            refused = self._refused.get(_refusal_key(request))
            if refused is None or len(requests) < refused.num_sequences or refused.until_s <= self._clock():
                continue
            if self._num_held_back < MAX_HELD_BACK:
                self._num_held_back += 1
                try:
                    await asyncio.sleep(refused.until_s - self._clock())
                finally:
                    self._num_held_back -= 1
            raise QueueFull(str(refused.error), retry_after_s=refused.hold_s)


def _refusal_key(request: GenerateRequest) -> tuple[str, str | None]:
    return request.tenant_id, None if request.adapter is None else request.adapter.digest


class PoisonRequests:
    """Requests over which engines failed. Each costs two engines, so for a while, which doubles each time, none like it
    is tried: of the same tenant for the same adapter, or for the base model with the same prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = FailureBackoff(clock)
        self._has_any = False  # usually, and then no request's key is computed

    def add(self, request: GenerateRequest) -> None:
        self._has_any = True
        self._backoff.record_failure(_poison_key(request), "engines failed")

    def check(self, request: GenerateRequest) -> None:
        """Raises AdapterQuarantined, or NotReady for a request to the base model."""
        if not self._has_any or not (left_s := self._backoff.left_s(_poison_key(request))):
            return
        again = f"engines failed over a request like this one; the next one is computed in {math.ceil(left_s)} s"
        if request.adapter is None:
            raise NotReady(again, retry_after_s=left_s)
        raise AdapterQuarantined(f"adapter {request.adapter.name!r}: {again}", retry_after_s=left_s)


def _poison_key(request: GenerateRequest) -> str:
    what = hash(request.token_ids) if request.adapter is None else request.adapter.digest
    return f"{request.tenant_id} {what}"


class Dispatcher:
    """All streams of one ingress process, on one event loop."""

    def __init__(
        self, batcher: Batcher, connections: ReplicaConnections, cold: ColdStartLimiter, count: CountEnded | None = None
    ) -> None:
        """`count` records the usage of attempts whose replicas cannot: they died, or their engines failed."""
        self._count = count
        self._batcher = batcher
        self.connections = connections
        self.cold = cold
        self.refusals = RecentRefusals()
        self.poison = PoisonRequests()

    async def stream(
        self,
        request: GenerateRequest,
        deadline_s: float = math.inf,
        on_assigned: Callable[[], None] = lambda: None,
        num_sequences: int = 1,
    ) -> AsyncGenerator[TokenChunk]:
        """Chunks of one request; the last one has a finish reason. `on_assigned` is called when a replica has it.
        `num_sequences`: how many the client's request has.

        Raises NotReady, QueueFull, EngineFailure, AdapterQuarantined, DeadlineExceeded. Closing the generator aborts
        the sequence. `deadline_s` is on the event loop's clock.
        """
        self.poison.check(request)
        stream = Stream(request, deadline_s)
        self.cold.enter(stream)
        timer = None
        if deadline_s < math.inf:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(deadline_s, lambda: stream.inbox.put(stream.deadline_error()))
        try:
            await self._attempt(stream)
            on_assigned()
            while not stream.closed:
                item = await stream.inbox.get()
                if isinstance(item, TokenChunk):
                    if not stream.received:
                        self.cold.leave(stream)
                    if isinstance(item.error, PoisonRequest):
                        self.poison.add(request)
                    stream.on_chunk(item)
                    yield item
                elif isinstance(item, PolyloraError):
                    if isinstance(item, QueueFull):
                        self.refusals.add(request, num_sequences, item)
                    raise item
                elif stream.on_loss(item):
                    self._count_owed(stream)
                    await self._attempt(stream)
        finally:
            self.cold.leave(stream)
            if timer is not None:
                timer.cancel()
            stream.read_rest()
            self._count_owed(stream)
            self.connections.end(stream)

    async def embedding(
        self, request: GenerateRequest, deadline_s: float, on_usage: Callable[[Usage], object] = lambda _: None
    ) -> bytes:
        """The vector of a request with `pooling`, as little-endian float32. Raises what `stream` raises, and the
        request's error."""
        async with aclosing(self.stream(request, deadline_s)) as chunks:
            async for chunk in chunks:
                if chunk.usage is not None and (chunk.error is None or chunk.is_billed):
                    on_usage(chunk.usage)
                if chunk.error is not None:
                    raise chunk.error
                if chunk.embedding:
                    return chunk.embedding
        raise EngineFailure(f"the engine ended request {request.request_id} without its embedding")

    async def close(self) -> None:
        """Stop reading; open streams are left to their callers."""
        await self.connections.close()

    def _count_owed(self, stream: Stream) -> None:
        for usage in stream.take_owed():
            if self._count is not None:
                self._count(stream.request, usage)

    async def _attempt(self, stream: Stream) -> None:
        try:
            stream.begin_attempt()
        except PoisonRequest:
            self.poison.add(stream.request)
            raise
        try:
            async with asyncio.timeout_at(stream.deadline_s if stream.deadline_s < math.inf else None):
                await self._batcher.assign(stream)
        except TimeoutError:
            raise stream.deadline_error() from None
