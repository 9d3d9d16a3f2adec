"""The chunks of an engine step, sorted into one frame per reader, and the form in which a frame travels.

In: a step's chunks, from the event loop. Out: an endless sequence of frames for every attached link, which is one
reader of one ingress. A reader that is behind gets its frames merged; nothing is dropped. A link that has had no
request for a while ends by itself, so that a draining replica runs out of readers. When a reader is gone, `detach`
returns the requests that it waited for, and the caller aborts them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from app.engine.request import TokenChunk


def pack_frame(chunks: Iterable[TokenChunk]) -> bytes:
    """A frame as it is sent: bytes, which Ray hands on as they are; anything else it would read twice.

    Chunks with nothing but tokens, nearly all, are tuples in it: 32 of them are written and read in 6 us, and 32
    objects of a class of ours in 130 us (on one core of an AMD EPYC).
    """
    items = [(chunk.request_id, chunk.token_ids) if _is_plain(chunk) else chunk for chunk in chunks]
    return pickle.dumps(items, pickle.HIGHEST_PROTOCOL)


def unpack_frame(packed: bytes) -> list[TokenChunk]:
    """Chunks equal to those that `pack_frame` was given, in the same order; from our own replicas only (pickle)."""
    return [TokenChunk(*item) if isinstance(item, tuple) else item for item in pickle.loads(packed)]


def _is_plain(chunk: TokenChunk) -> bool:
    return chunk.finish_reason is None and chunk.usage is None and not chunk.logprobs


@dataclass(eq=False, slots=True)
class _Reader:
    """What waits for the reader of one link, and which requests it waits for."""

    chunks: list[TokenChunk] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    request_ids: set[str] = field(default_factory=set)
    end: Exception | None = None
    left: bool = False


class FrameHub:
    """Knows which reader waits for which request. It is used on one event loop, without threads."""

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._owners: dict[str, _Reader] = {}

    @property
    def num_links(self) -> int:
        return len(self._readers)

    def is_attached(self, link_id: str) -> bool:
        return link_id in self._readers

    def owns(self, request_id: str) -> bool:
        return request_id in self._owners

    def expect(self, link_id: str, request_id: str) -> None:
        """Chunks of this request go to this link from now on."""
        reader = self._readers[link_id]
        reader.request_ids.add(request_id)
        self._owners[request_id] = reader

    def deliver(self, chunks: Iterable[TokenChunk]) -> None:
        """Hand chunks to their links. A chunk that nobody waits for (aborted, reader gone) ends here."""
        for chunk in chunks:
            reader = self._owners.get(chunk.request_id)
            if reader is None:
                continue
            reader.chunks.append(chunk)
            reader.news.set()
            if chunk.finish_reason is not None:
                self.forget(chunk.request_id)

    def end(self, error: Exception) -> None:
        """End every link with this error, after what it was given before: nothing more is computed here."""
        for reader in self._readers.values():
            reader.end = error
            reader.news.set()

    def forget(self, request_id: str) -> None:
        """Nothing more is expected for this request."""
        reader = self._owners.pop(request_id, None)
        if reader is not None:
            reader.request_ids.discard(request_id)

    async def frames(self, link_id: str, idle_s: float) -> AsyncGenerator[list[TokenChunk]]:
        """Frames of one link, an empty one first. Ends after `idle_s` without a request, or as `end` or `leave` say."""
        reader = self._readers[link_id] = _Reader()
        yield []
        while True:
            try:
                await asyncio.wait_for(reader.news.wait(), idle_s)
            except TimeoutError:
                if not reader.request_ids and not reader.chunks:
                    return
                continue
            if reader.left:
                return
            frame, reader.chunks = reader.chunks, []
            reader.news.clear()
            if frame:
                yield frame
            if reader.end is not None and not reader.chunks:  # some may have come while the frame was read
                raise reader.end

    def leave(self, link_id: str) -> None:
        """Nobody reads this link any more: it ends now."""
        if (reader := self._readers.get(link_id)) is not None:
            reader.left = True
            reader.news.set()

    def detach(self, link_id: str) -> list[str]:
        """The reader is gone. Returns the requests it still waited for."""
        reader = self._readers.pop(link_id, None)
        orphans = sorted(reader.request_ids) if reader is not None else []
        for request_id in orphans:
            self.forget(request_id)
        return orphans
