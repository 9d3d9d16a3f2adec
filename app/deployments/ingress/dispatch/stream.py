"""State of one request on its way to its tokens, over all attempts to compute it, and the link to its replica.

An attempt begins (`begin_attempt`), is taken by a link (`ReplicaConnection.take`) and ends with its last chunk, with a `Loss`, or
because the replica has no room for it. Chunks and losses come through the stream's inbox, in order; whoever reads the
inbox hands them back (`take_chunk`, `take_loss`). Every attempt is a new request to the engine, so nothing that an old
replica still does can reach the stream. All of it is used on one event loop.
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
from app.engine.errors import AdapterKeptOut, DeadlineExceeded, EngineFailure, Overloaded, PolyloraError, QueueFull
from app.engine.request import GenerateRequest, RequestUsage, TokenChunk

T = TypeVar("T")

#: A request that was on this many replicas when they died is blamed for it. Replicas that were stopped do not count,
#: nor do failed engines: which request is to blame for those is found out by the replica (`trials`).
MAX_LOSSES = 4


class Loss(Enum):
    """Why an attempt at a stream came to nothing."""

    LINK_ENDED = auto()  # the replica lives, and bills what it has computed
    READER_FAILED = auto()  # reading its frames raised an unexpected error; it lives and bills all the same
    REPLICA_DIED = auto()
    REPLICA_STOPPED = auto()  # it was draining, or its engine failed in a step without this stream
    ENGINE_FAILED = auto()  # in a step that computed this stream

    @property
    def is_replica_death(self) -> bool:
        """Whether the stream may be to blame. A reader that fails counts too, so that no stream is moved for ever."""
        return self in (Loss.REPLICA_DIED, Loss.READER_FAILED)

    @property
    def is_billed(self) -> bool:
        """Whether the replica bills what it has computed of the stream."""
        return self in (Loss.LINK_ENDED, Loss.READER_FAILED)


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """Put in a stream's inbox in place of a chunk: there must be another attempt."""

    attempt: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class ReplicaFull:
    """Put there in place of a chunk, too: a replica has no room for the request, and has computed nothing of it."""

    attempt: int
    replica_id: str
    error: Overloaded


class SingleReaderQueue(Generic[T]):
    """An unbounded queue with one reader. An `asyncio.Queue`, which takes many readers, costs three times as much."""

    __slots__ = ("_items", "_news")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._news: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._news is not None and not self._news.done():  # done: its reader is on its way, or was cancelled
            self._news.set_result(None)

    async def get(self) -> T:
        """Take the first item that is left; waits for one."""
        while not self._items:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._items.popleft()


@dataclass(eq=False, slots=True)
class Stream:
    """One request on its way: where it is computed and what has arrived.

    `deadline_s` is a time of the event loop's clock. While `submitting` is set an abort would overtake the submission
    of its own request, so it is held back. `refusals` says why each replica that was asked since the last loss has no
    room. An error in the inbox ends the stream with it. `num_charged` of the tokens that were resumed or received are
    counted by replicas that it has left; None: not even its prompt. `num_before` had been received when the present
    attempt began.
    """

    request: GenerateRequest
    deadline_s: float = math.inf
    inbox: SingleReaderQueue[TokenChunk | AttemptLost | ReplicaFull | PolyloraError] = field(
        default_factory=SingleReaderQueue
    )
    received: list[int] = field(default_factory=list)
    link: ReplicaConnection | None = None
    attempt: int = 0
    num_losses: int = 0
    num_failures: int = 0
    num_charged: int | None = None
    num_before: int = 0
    refusals: dict[str, Overloaded] = field(default_factory=dict)
    submitting: bool = False
    closed: bool = False

    @property
    def attempt_id(self) -> str:
        """The request id that the engine knows this attempt by."""
        return f"{self.request.request_id}/{self.attempt}"

    def attempt_request(self) -> GenerateRequest:
        """The request as this attempt computes it: it goes on from the tokens that were received."""
        resume = (*self.request.resume_token_ids, *self.received)
        return replace(
            self.request,
            request_id=self.attempt_id,
            resume_token_ids=resume,
            num_failures=self.num_failures,
            num_charged=self.num_charged,
        )

    def begin_attempt(self) -> None:
        """Another attempt begins. Raises EngineFailure if too many replicas have died with the stream."""
        if self.num_losses >= MAX_LOSSES:
            raise EngineFailure(
                f"request {self.request.request_id} lost {MAX_LOSSES} replicas, which died with it; giving up on it"
            )
        self.attempt += 1

    def take_chunk(self, chunk: TokenChunk) -> None:
        """The reader has a chunk from the inbox."""
        self.received.extend(chunk.token_ids)
        self.closed = chunk.finish_reason is not None

    def take_loss(self, item: AttemptLost | ReplicaFull) -> bool:
        """The reader has this from the inbox. True if it ends the present attempt: then another one is due."""
        if item.attempt != self.attempt:
            return False
        if isinstance(item, ReplicaFull):
            self.refusals[item.replica_id] = item.error
            return True
        self.num_losses += item.loss.is_replica_death
        self.num_failures += item.loss is Loss.ENGINE_FAILED
        self.refusals.clear()
        if item.loss.is_billed and len(self.received) > self.num_before:
            self.num_charged = len(self.request.resume_token_ids) + len(self.received)
        self.num_before = len(self.received)
        return True

    def unclaimed(self) -> RequestUsage | None:
        """What replicas that died have computed, of a stream that ends without another: nobody else counts it."""
        num_tokens = len(self.request.resume_token_ids) + len(self.received) - (self.num_charged or 0)
        if self.link is not None or self.num_before < len(self.received) or not num_tokens:
            return None
        return RequestUsage(len(self.request.token_ids) if self.num_charged is None else 0, 0, num_tokens)

    def late(self) -> DeadlineExceeded:
        """The error of a request whose time is over."""
        request_id = self.request.request_id
        return DeadlineExceeded(f"request {request_id} took longer than limits.request_timeout_s; it was aborted")

    def leave_link(self) -> None:
        """Expect nothing more of the present attempt."""
        if self.link is not None:
            if self.link.streams.pop(self.attempt_id, None) is not None:
                self.link.count(-1)
            self.link = None

    def lose(self, attempt: int, loss: Loss) -> None:
        """Ask for another attempt, unless one has begun since."""
        if self.attempt == attempt:
            self.inbox.put(AttemptLost(attempt, loss))
            self.leave_link()

    def lose_engine(self, failure: EngineFailed) -> None:
        """The engine of the present attempt has failed: ask for another attempt, unless this request is to blame."""
        if failure.culprit == self.attempt_id:
            self.fail(
                EngineFailure(
                    f"request {self.request.request_id} was being computed when {self.num_failures + 1} engines "
                    "failed, the last time as the only suspect; giving up on it"
                )
            )
        else:
            is_suspect = self.attempt_id in failure.suspects
            self.lose(self.attempt, Loss.ENGINE_FAILED if is_suspect else Loss.REPLICA_STOPPED)

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.inbox.put(TokenChunk(self.attempt_id, finish_reason="error", error=error))
        self.leave_link()


@dataclass(eq=False, slots=True)
class ReplicaConnection:
    """The connection to one replica, and the streams that are computed there.

    `wait_until_settled` is set when it is known whether the replica has attached us: with the first frame, or when the link ends
    before. A replica that is `draining` takes no new requests; sooner or later it is stopped. `count` is told of
    streams that come (more than 0) and leave.
    """

    replica_id: str
    count: Callable[[int], None]
    link_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    streams: dict[str, Stream] = field(default_factory=dict)  # by attempt id
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_attached: bool = False
    draining: bool = False
    reader: asyncio.Task[None] | None = None

    def attached(self) -> None:
        """The first frame has come."""
        self.is_attached = True
        self.settled.set()

    def take(self, stream: Stream) -> None:
        """Deliver the chunks of the stream's present attempt to it from now on."""
        stream.link = self
        self.streams[stream.attempt_id] = stream
        self.count(+1)

    def deliver(self, chunk: TokenChunk) -> None:
        """Hand a chunk to its stream. A stream that was closed meanwhile is not here: its abort is on the way."""
        stream = self.streams.get(chunk.request_id)
        if stream is None:
            return
        if isinstance(chunk.error, QueueFull | AdapterKeptOut):
            stream.inbox.put(ReplicaFull(stream.attempt, self.replica_id, chunk.error))
        else:
            stream.inbox.put(chunk)
        if chunk.finish_reason is not None:
            stream.leave_link()

    def lose_all(self, loss: Loss | EngineFailed) -> None:
        """Ask for another attempt at every stream."""
        for stream in list(self.streams.values()):
            if isinstance(loss, EngineFailed):
                stream.lose_engine(loss)
            else:
                stream.lose(stream.attempt, loss)
