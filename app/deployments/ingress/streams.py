"""One request on its way, and the connection to the replica that computes it.

The dispatcher changes these, on one event loop; a stream's caller reads its inbox. Every placement is a new engine
request, so nothing an old replica still does can reach the stream.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import dataclass, field, replace

from app.deployments.ingress.inbox import Inbox
from app.engine.errors import DeadlineExceeded, Overloaded
from app.engine.request import GenerateRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class Lost:
    """Put in a stream's inbox in place of a chunk: that placement came to nothing, the stream must be placed again.

    `died`: the replica died with the stream on it. `failed`: its engine did, in a step that computed the stream.
    """

    placement: int
    died: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The same: that replica has no room for the request, and has computed nothing of this placement."""

    placement: int
    replica_id: str
    error: Overloaded


@dataclass(eq=False, slots=True)
class Stream:
    """One request on its way: where it is computed and what has arrived.

    `deadline_s` is a time of the event loop's clock. `submitting` holds back an abort that would overtake its own
    submission. `refusals`: why each replica that was asked since the last loss has no room.
    """

    request: GenerateRequest
    deadline_s: float = math.inf
    inbox: Inbox[TokenChunk | Lost | Refused | DeadlineExceeded] = field(default_factory=Inbox)
    received: list[int] = field(default_factory=list)
    link: Link | None = None
    placement: int = 0
    num_losses: int = 0
    num_failures: int = 0
    refusals: dict[str, Overloaded] = field(default_factory=dict)
    submitting: bool = False
    closed: bool = False

    @property
    def placement_id(self) -> str:
        return f"{self.request.request_id}/{self.placement}"

    def late(self) -> DeadlineExceeded:
        request_id = self.request.request_id
        return DeadlineExceeded(f"request {request_id} took longer than limits.request_timeout_s; it was aborted")

    def placed_request(self) -> GenerateRequest:
        """The request as this placement computes it: from the tokens already received."""
        resume = (*self.request.resume_token_ids, *self.received)
        return replace(
            self.request,
            request_id=self.placement_id,
            resume_token_ids=resume,
            num_failures=self.num_failures,
        )


@dataclass(eq=False, slots=True)
class Link:
    """Our connection to one replica. `attached` is set by the first frame, or failed with the reader.

    `draining`: the replica takes no new requests; sooner or later it is stopped.
    """

    replica_id: str
    attached: asyncio.Future[None]
    link_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    streams: dict[str, Stream] = field(default_factory=dict)
    reader: asyncio.Task[None] | None = None
    draining: bool = False
