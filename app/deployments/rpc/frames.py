"""Frames: the chunks of an engine step, sorted by reader, and their wire format.

A link is one reader of one ingress. A slow reader gets its frames merged; nothing is dropped. An idle link carries an
empty frame every second as a heartbeat; a reader that misses several gives the link up (`with_heartbeat`). A link
without requests ends after a while, so that a draining replica runs out of readers. When a reader is gone, `detach`
returns its requests and the caller aborts them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack

from app.deployments.rpc.background_tasks import wait_for_event
from app.deployments.rpc.transport import ReplicaUnreachable
from app.engine import errors
from app.engine.errors import PolyloraError
from app.engine.request import RequestTiming, RequestUsage, TokenChunk, TokenLogprobs, Usage

T = TypeVar("T")

_END: Any = object()

#: First size of a frame's buffer; the library's own of 256 KiB takes longer to allocate than a frame to write.
_BUFFER_BYTES = 4096

#: A link carries a frame at least this often.
HEARTBEAT_S = 1.0
#: A link is given up after this many missed heartbeats. The reader's event loop counts them, so a reader that was
#: suspended itself has missed none.
MAX_MISSED_HEARTBEATS = 5


def pack_frame(chunks: Iterable[TokenChunk]) -> bytes:
    """A frame in MessagePack, as bytes, which Ray passes on unchanged (anything else it would serialize again).

    A chunk is an array: of its first two fields if it has tokens only, as nearly all do, otherwise of all.
    """
    items = [
        (chunk.request_id, chunk.token_ids)
        if chunk.finish_reason is None and chunk.usage is None and not chunk.logprobs and not chunk.prompt_logprobs
        else _fields_of(chunk)
        for chunk in chunks
    ]
    packed: bytes = msgpack.Packer(buf_size=_BUFFER_BYTES).pack(items)
    return packed


def unpack_frame(packed: bytes) -> list[TokenChunk]:
    """The chunks given to `pack_frame`, in the same order. Raises ValueError or TypeError for anything else."""
    items = msgpack.unpackb(packed, use_list=False)
    return [TokenChunk(*item) if len(item) == 2 else _chunk_of(*item) for item in items]


def _fields_of(chunk: TokenChunk) -> tuple[Any, ...]:
    """A chunk's fields in order, as plain values."""
    usage = chunk.usage
    return (
        chunk.request_id,
        chunk.token_ids,
        _logprobs_of(chunk.logprobs),
        chunk.finish_reason,
        chunk.matched_stop,
        usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        chunk.error and _error_json(chunk.error),
        chunk.embedding,
        chunk.request_usage,
        _logprobs_of(chunk.prompt_logprobs),
        chunk.timing,
    )


def _logprobs_of(logprobs: Iterable[TokenLogprobs]) -> list[tuple[Any, ...]]:
    return [(each.token_id, each.logprob, each.top, each.rank) for each in logprobs]


def _chunk_of(
    request_id: str,
    token_ids: tuple[int, ...],
    logprobs: Iterable[tuple[Any, ...]],
    finish_reason: Any,
    matched_stop: int | None,
    usage: tuple[int, ...] | None,
    error: str | None,
    embedding: bytes,
    request_usage: tuple[int, ...] | None,
    prompt_logprobs: Iterable[tuple[Any, ...]],
    timing: tuple[int, ...] | None,
) -> TokenChunk:
    """The opposite of `_fields_of`."""
    return TokenChunk(
        request_id,
        token_ids,
        tuple([TokenLogprobs(*each) for each in logprobs]),
        finish_reason,
        matched_stop,
        None if usage is None else Usage(*usage),
        None if error is None else _error_of(error),
        embedding,
        None if request_usage is None else RequestUsage(*request_usage),
        tuple([TokenLogprobs(*each) for each in prompt_logprobs]),
        None if timing is None else RequestTiming(*timing),
    )


def _error_json(error: Exception) -> str:
    """The nearest class in `app.engine.errors`, the message and the attributes. JSON, because a message may quote text
    that is not valid Unicode."""
    kind = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    return json.dumps([kind.__name__, str(error), vars(error)], default=list)


def _error_of(text: str) -> PolyloraError:
    name, message, attributes = json.loads(text)
    kind = vars(errors).get(name)
    if not (isinstance(kind, type) and issubclass(kind, PolyloraError)):
        raise ValueError(f"a frame has an error of the unknown class {name!r}")
    return kind(message, **attributes)


@dataclass(eq=False, slots=True)
class _Reader:
    """A link's reader: its undelivered chunks and its requests."""

    chunks: list[TokenChunk] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    request_ids: set[str] = field(default_factory=set)
    end: Exception | None = None
    is_closed: bool = False


class FrameHub:
    """Maps requests to readers. Used on one event loop, without threads."""

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._owners: dict[str, _Reader] = {}

    @property
    def num_links(self) -> int:
        return len(self._readers)

    def is_attached(self, link_id: str) -> bool:
        return link_id in self._readers

    def is_registered(self, request_id: str) -> bool:
        return request_id in self._owners

    def register(self, link_id: str, request_id: str) -> None:
        """Send chunks of this request to this link from now on."""
        reader = self._readers[link_id]
        reader.request_ids.add(request_id)
        self._owners[request_id] = reader

    def deliver(self, chunks: Iterable[TokenChunk]) -> None:
        """Pass chunks to their links. Chunks without a reader (aborted, reader gone) are dropped."""
        for chunk in chunks:
            reader = self._owners.get(chunk.request_id)
            if reader is None:
                continue
            if not reader.chunks:
                reader.changed.set()
            reader.chunks.append(chunk)
            if chunk.finish_reason is not None:
                self.unregister(chunk.request_id)

    def end(self, error: Exception) -> None:
        """End every link with this error, after its pending chunks."""
        for reader in self._readers.values():
            reader.end = error
            reader.changed.set()

    def unregister(self, request_id: str) -> None:
        """Expect nothing more for this request."""
        reader = self._owners.pop(request_id, None)
        if reader is not None:
            reader.request_ids.discard(request_id)

    async def frames(self, link_id: str, idle_s: Callable[[], float]) -> AsyncGenerator[list[TokenChunk]]:
        """Frames of one link, an empty one first, until `idle_s()` without a request, `end` or `close_link`."""
        reader = self._readers[link_id] = _Reader()
        now_s = asyncio.get_running_loop().time
        idle_from_s = now_s()
        yield []
        while True:
            if not await wait_for_event(reader.changed, min(HEARTBEAT_S, idle_from_s + idle_s() - now_s())):
                if reader.request_ids or reader.chunks:
                    idle_from_s = now_s()
                elif now_s() - idle_from_s >= idle_s():
                    return
                yield []
                continue
            idle_from_s = now_s()
            if reader.is_closed:
                return
            frame, reader.chunks = reader.chunks, []
            reader.changed.clear()
            if frame:
                yield frame
            if reader.end is not None and not reader.chunks:  # more may have arrived while the frame was consumed
                raise reader.end

    def close_link(self, link_id: str) -> None:
        """Close the link immediately; its reader disconnected."""
        if (reader := self._readers.get(link_id)) is not None:
            reader.is_closed = True
            reader.changed.set()

    def detach(self, link_id: str) -> list[str]:
        """Remove a link's reader; returns its open requests."""
        reader = self._readers.pop(link_id, None)
        request_ids = sorted(reader.request_ids) if reader is not None else []
        for request_id in request_ids:
            self.unregister(request_id)
        return request_ids


class HeartbeatTimeout:
    """Counts missed heartbeats of a link, on its reader's event loop."""

    def __init__(self, on_timeout: Callable[[], None]) -> None:
        """`on_timeout` is called once, after `MAX_MISSED_HEARTBEATS`."""
        self._on_timeout = on_timeout
        self._num_missed = 0
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._tick)

    def reset(self) -> None:
        """A frame has arrived."""
        self._num_missed = 0

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._num_missed += 1
        if self._num_missed > MAX_MISSED_HEARTBEATS:
            self._on_timeout()
        else:
            self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._tick)


async def with_heartbeat(items: AsyncIterator[T]) -> AsyncGenerator[T]:
    """The same items. Raises ReplicaUnreachable if, after the first, none comes for `MAX_MISSED_HEARTBEATS`."""
    timeout_s = None
    while True:
        following = asyncio.ensure_future(anext(items, _END))
        try:
            num_missed = 0
            while not (await asyncio.wait([following], timeout=timeout_s))[0]:
                num_missed += 1
                if num_missed > MAX_MISSED_HEARTBEATS:
                    raise heartbeat_lost()
        finally:
            following.cancel()
        if (item := following.result()) is _END:
            return
        yield item
        timeout_s = HEARTBEAT_S


def heartbeat_lost() -> ReplicaUnreachable:
    """The error of a link that is given up."""
    return ReplicaUnreachable(f"no heartbeat of the replica for {MAX_MISSED_HEARTBEATS * HEARTBEAT_S:g} s")
