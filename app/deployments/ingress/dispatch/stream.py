"""State of one request over all attempts to compute it, and the connection to its replica.

An attempt begins with `begin_attempt`, is taken by a connection (`ReplicaConnection.take`), and ends with its last
chunk, with a `Loss`, or because the replica is full. Chunks and losses arrive in the inbox, in order; its reader passes
them to `on_chunk` and `on_loss`. Every attempt is a new request to the engine, so an old replica cannot affect the
stream. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Generic, TypeVar

from app.deployments.rpc.transport import EngineFailed
from app.engine.errors import (
    AdapterPoolFull,
    DeadlineExceeded,
    PoisonRequest,
    PolyloraError,
    QueueFull,
    ServerOverloaded,
)
from app.engine.request import GenerateRequest, RequestUsage, TokenChunk

T = TypeVar("T")

#: A request that was on this many replicas when they died is considered the cause. Stopped replicas do not count, nor
#: do failed engines, whose replica isolates the cause itself (`suspect_isolation`).
MAX_LOSSES = 4


class Loss(Enum):
    """Why an attempt was lost."""

    LINK_ENDED = auto()  # the replica is alive and records the usage
    READER_FAILED = auto()  # a bug while reading frames; the replica is alive and records the usage
    REPLICA_DIED = auto()
    REPLICA_STOPPED = auto()  # it was draining, or its engine failed in a step without this stream
    ENGINE_FAILED = auto()  # in a step with this stream

    @property
    def is_replica_death(self) -> bool:
        """Whether the stream may be the cause. READER_FAILED counts, so that no stream moves forever."""
        return self in (Loss.REPLICA_DIED, Loss.READER_FAILED)

    @property
    def is_billed(self) -> bool:
        """Whether the replica records the usage of this attempt."""
        return self in (Loss.LINK_ENDED, Loss.READER_FAILED)


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """Inbox item: the attempt is lost, another one is needed."""

    attempt: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class ReplicaFull:
    """Inbox item: the replica has no room for the request. `is_billed`: it records the usage of all attempts so far."""

    attempt: int
    replica_id: str
    error: ServerOverloaded
    is_billed: bool = False


class SingleReaderQueue(Generic[T]):
    """An unbounded queue with one reader. `asyncio.Queue`, which allows many readers, costs three times as much."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        if (
            self._waiter is not None and not self._waiter.done()
        ):  # done: the reader is already waking up, or was cancelled
            self._waiter.set_result(None)

    async def get(self) -> T:
        """Remove and return the first item; waits for one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def take_all(self) -> list[T]:
        """Remove and return what is there."""
        items = [*self._items]
        self._items.clear()
        return items


@dataclass(eq=False, slots=True)
class Stream:
    """One request: where it is computed and what has arrived.

    `deadline_s` is on the event loop's clock. While `submitting` is set, an abort waits, because it could overtake its
    own request's submission. `refusals`: why each replica tried since the last loss had no room. An error in the inbox
    ends the stream. `num_charged`: of the resumed and received tokens, those whose usage replicas record or is in
    `owed`; None: not even the prompt. `owed`: usage on replicas that cannot record it, which this ingress is to record.
    `num_before`: tokens received before the current attempt. `num_cached`: prompt tokens that the latest attempt with
    tokens found in the prefix cache.
    """

    request: GenerateRequest
    deadline_s: float = math.inf
    inbox: SingleReaderQueue[TokenChunk | AttemptLost | ReplicaFull | PolyloraError] = field(
        default_factory=SingleReaderQueue
    )
    received: list[int] = field(default_factory=list)
    connection: ReplicaConnection | None = None
    attempt: int = 0
    num_losses: int = 0
    num_failures: int = 0
    num_charged: int | None = None
    owed: list[RequestUsage] = field(default_factory=list)
    num_before: int = 0
    num_cached: int = 0
    refusals: dict[str, ServerOverloaded] = field(default_factory=dict)
    submitting: bool = False
    closed: bool = False

    @property
    def attempt_id(self) -> str:
        """The engine's request id for this attempt."""
        return f"{self.request.request_id}/{self.attempt}"

    def attempt_request(self) -> GenerateRequest:
        """The request for this attempt: it resumes after the tokens received so far."""
        resume = (*self.request.resume_token_ids, *self.received)
        return replace(
            self.request,
            request_id=self.attempt_id,
            resume_token_ids=resume,
            num_failures=self.num_failures,
            num_charged=self.num_charged,
        )

    def begin_attempt(self) -> None:
        """Start another attempt. Raises PoisonRequest if too many replicas died with the stream."""
        if self.num_losses >= MAX_LOSSES:
            raise PoisonRequest(
                f"request {self.request.request_id} was on {MAX_LOSSES} replicas when they died; giving up on it"
            )
        self.attempt += 1

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Record a chunk that the reader took from the inbox."""
        self.received.extend(chunk.token_ids)
        if chunk.usage is not None:
            self.num_cached = chunk.usage.cached_tokens
        if chunk.finish_reason is not None:
            self.closed = True
            self._end_attempt(is_recorded=chunk.request_usage is not None)

    def on_loss(self, item: AttemptLost | ReplicaFull) -> bool:
        """Record a loss that the reader took from the inbox. Returns True if the current attempt is over."""
        if item.attempt != self.attempt:
            return False
        if isinstance(item, ReplicaFull):
            self.refusals[item.replica_id] = item.error
            is_recorded = item.is_billed
        else:
            self.num_losses += item.loss.is_replica_death
            self.num_failures += item.loss is Loss.ENGINE_FAILED
            self.refusals.clear()
            is_recorded = item.loss.is_billed and len(self.received) > self.num_before
        self._end_attempt(is_recorded=is_recorded)
        return True

    def _end_attempt(self, *, is_recorded: bool) -> None:
        """The current attempt is over. `is_recorded`: its replica records its usage."""
        num_tokens = len(self.request.resume_token_ids) + len(self.received)
        is_owed = not is_recorded and len(self.received) > self.num_before
        if is_owed:
            prompt = (len(self.request.token_ids), self.num_cached) if self.num_charged is None else (0, 0)
            self.owed.append(RequestUsage(*prompt, num_tokens - (self.num_charged or 0)))
        if is_owed or is_recorded:
            self.num_charged = num_tokens
        self.num_before = len(self.received)

    def take_owed(self) -> list[RequestUsage]:
        """Remove and return the usage that this ingress is to record."""
        owed, self.owed = self.owed, []
        return owed

    def read_rest(self) -> None:
        """Record what is in the inbox, whose reader has left."""
        for item in self.inbox.take_all():
            if isinstance(item, TokenChunk):
                self.on_chunk(item)
            elif isinstance(item, AttemptLost | ReplicaFull):
                self.on_loss(item)

    def deadline_error(self) -> DeadlineExceeded:
        request_id = self.request.request_id
        message = f"request {request_id} took longer than limits.request_timeout_s; it was aborted"
        return DeadlineExceeded(message, len(self.received))

    def leave_connection(self) -> None:
        """Detach from the current attempt's connection."""
        if self.connection is not None:
            if self.connection.streams.pop(self.attempt_id, None) is not None:
                self.connection.count(-1)
            self.connection = None

    def lose(self, attempt: int, loss: Loss) -> None:
        """Request another attempt, unless one has begun since."""
        if self.attempt == attempt:
            self.inbox.put(AttemptLost(attempt, loss))
            self.leave_connection()

    def lose_engine(self, failure: EngineFailed) -> None:
        """The current attempt's engine failed: request another attempt, unless this request is the cause."""
        if failure.culprit == self.attempt_id:
            self.fail(
                PoisonRequest(
                    f"request {self.request.request_id} was being computed when {self.num_failures + 1} engines "
                    "failed, the last time as the only suspect; giving up on it"
                )
            )
        else:
            is_suspect = self.attempt_id in failure.suspects
            self.lose(self.attempt, Loss.ENGINE_FAILED if is_suspect else Loss.REPLICA_STOPPED)

    def fail(self, error: Exception) -> None:
        self.inbox.put(TokenChunk(self.attempt_id, finish_reason="error", error=error))
        self.leave_connection()


@dataclass(eq=False, slots=True)
class ReplicaConnection:
    """The connection to one replica, and the streams computed there.

    `settled` is set once it is known whether we are attached: with the first frame, or when the connection ends before
    it. A `draining` replica takes no new requests and will be stopped. `count` is called with +1 and -1 for streams
    that join and leave.
    """

    replica_id: str
    count: Callable[[int], None]
    link_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    streams: dict[str, Stream] = field(default_factory=dict)  # by attempt id
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_attached: bool = False
    draining: bool = False
    reader: asyncio.Task[None] | None = None

    def mark_attached(self) -> None:
        self.is_attached = True
        self.settled.set()

    def take(self, stream: Stream) -> None:
        """Deliver chunks of the stream's current attempt to it from now on."""
        stream.connection = self
        self.streams[stream.attempt_id] = stream
        self.count(+1)

    def deliver(self, chunk: TokenChunk) -> None:
        """Pass a chunk to its stream. A closed stream is no longer here; its abort is on the way."""
        stream = self.streams.get(chunk.request_id)
        if stream is None:
            return
        if chunk.finish_reason is None:
            stream.inbox.put(chunk)
            return
        if isinstance(chunk.error, QueueFull | AdapterPoolFull):
            stream.inbox.put(ReplicaFull(stream.attempt, self.replica_id, chunk.error, chunk.is_billed))
        else:
            stream.inbox.put(chunk)
        stream.leave_connection()

    def lose_all(self, loss: Loss | EngineFailed) -> None:
        """Request another attempt for every stream."""
        for stream in list(self.streams.values()):
            if isinstance(loss, EngineFailed):
                stream.lose_engine(loss)
            else:
                stream.lose(stream.attempt, loss)
