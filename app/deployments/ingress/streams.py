"""One request on its way to its tokens, and the link to the replica that computes it.

In: chunks and losses, put into a stream's inbox. Out: whoever reads the stream takes them from there, in order. Rule:
every attempt at a stream is a new request to the engine, so nothing that an old replica still does can reach the
stream. All of it is used on one event loop.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from app.deployments.ingress.inbox import Inbox
from app.deployments.links.transport import EngineFailed
from app.engine.errors import AdapterKeptOut, DeadlineExceeded, EngineFailure, Overloaded, PolyloraError, QueueFull
from app.engine.request import Consumption, GenerateRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class Lost:
    """Put in a stream's inbox in place of a chunk: this attempt came to nothing, and there must be another.

    `died`: the replica died with the stream on it. `failed`: its engine failed in a step that computed the stream.
    `is_charged`: the replica lives, and counts what it has computed of the stream.
    """

    attempt: int
    died: bool
    failed: bool
    is_charged: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaFull:
    """Put there in place of a chunk, too: a replica has no room for the request, and has computed nothing of it."""

    attempt: int
    replica_id: str
    error: Overloaded


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
    inbox: Inbox[TokenChunk | Lost | ReplicaFull | PolyloraError] = field(default_factory=Inbox)
    received: list[int] = field(default_factory=list)
    link: Link | None = None
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

    def take_loss(self, lost: Lost) -> None:
        """The present attempt is lost, and all it has sent was received."""
        self.num_losses += lost.died
        self.num_failures += lost.failed
        self.refusals.clear()
        if lost.is_charged and len(self.received) > self.num_before:
            self.num_charged = len(self.request.resume_token_ids) + len(self.received)
        self.num_before = len(self.received)

    def unclaimed(self) -> Consumption | None:
        """What replicas that died have computed, of a stream that ends without another: nobody else counts it."""
        num_tokens = len(self.request.resume_token_ids) + len(self.received) - (self.num_charged or 0)
        if self.link is not None or self.num_before < len(self.received) or not num_tokens:
            return None
        return Consumption(len(self.request.token_ids) if self.num_charged is None else 0, 0, num_tokens)

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

    def lose(
        self, attempt: int, *, died: bool = False, failure: EngineFailed | None = None, is_gone: bool = False
    ) -> None:
        """Ask for another attempt, unless one has begun since, or this request is to blame for an engine's failure."""
        if self.attempt != attempt:
            return
        if failure is not None and failure.culprit == self.attempt_id:
            self.fail(
                EngineFailure(
                    f"request {self.request.request_id} was being computed when {self.num_failures + 1} engines "
                    "failed, the last time as the only suspect; giving up on it"
                )
            )
            return
        failed = failure is not None and self.attempt_id in failure.suspects
        self.inbox.put(Lost(attempt, died and self.link is not None, failed, not is_gone))
        self.leave_link()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.inbox.put(TokenChunk(self.attempt_id, finish_reason="error", error=error))
        self.leave_link()


@dataclass(eq=False, slots=True)
class Link:
    """The connection to one replica, and the streams that are computed there.

    `settled` is set when it is known whether the replica has attached us: with the first frame, or when the link ends
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

    def lose_all(self, *, died: bool, failure: EngineFailed | None, is_gone: bool) -> None:
        """Ask for another attempt at every stream. `is_gone`: the replica, or its engine, has ended."""
        for stream in list(self.streams.values()):
            stream.lose(stream.attempt, died=died, failure=failure, is_gone=is_gone)
