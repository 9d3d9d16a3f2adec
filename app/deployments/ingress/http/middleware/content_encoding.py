"""Compressed request bodies: gzip, deflate and zstd, decoded while they arrive.

What stands behind counts, limits and reads decoded bytes, in parts of at most `PART_BYTES`, so that a small body that
decodes to a huge one costs no more than the limit of its route.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard
from starlette.types import Message, Receive, Scope

from app.deployments.ingress.error_responses import UnknownEncoding
from app.engine.errors import InvalidRequest

#: The most bytes of a decoded part; of zstd this is a measure, because a block is decoded as a whole.
PART_BYTES = 256 << 10
#: The longest window of a zstd body, as RFC 9659 demands it of content encodings.
_WINDOW_BYTES = 8 << 20
#: Compressed bytes of zstd that are decoded at once: four bytes can be a block of 128 KiB.
_ZSTD_STEP_BYTES = 32


class _Decoder(Protocol):
    def parts(self, content: bytes) -> Iterator[bytes]:
        """Decoded parts of the next bytes. Raises ValueError."""
        ...

    @property
    def is_complete(self) -> bool: ...


class _Zlib:
    """gzip of any number of members, and deflate with zlib's header or without."""

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding != "deflate"
        self._decoder: zlib._Decompress | None = None

    @property
    def is_complete(self) -> bool:
        return self._decoder is not None and self._decoder.eof

    def parts(self, content: bytes) -> Iterator[bytes]:
        is_full = False  # the decoder may hold more
        while content or is_full:
            if self._decoder is None or (self._is_gzip and self._decoder.eof):
                self._decoder = zlib.decompressobj(16 + zlib.MAX_WBITS if self._is_gzip else _window_bits(content))
            elif self._decoder.eof:
                raise ValueError("there are bytes behind its end")
            try:
                part = self._decoder.decompress(content, PART_BYTES)
            except zlib.error as error:
                raise ValueError(str(error)) from None
            yield part
            is_full = len(part) == PART_BYTES and not self._decoder.eof
            content = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail


class _Zstd:
    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
        self._has_begun = False

    @property
    def is_complete(self) -> bool:
        return self._has_begun and self._decoder.eof

    def parts(self, content: bytes) -> Iterator[bytes]:
        pending, size, start = list[bytes](), 0, 0
        while start < len(content):
            if self._decoder.eof:  # another frame
                self._decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
            self._has_begun = True
            step = content[start : start + _ZSTD_STEP_BYTES]
            try:
                pending.append(self._decoder.decompress(step))
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from None
            size += len(pending[-1])
            start += len(step) - len(self._decoder.unused_data)
            if size >= PART_BYTES:
                yield b"".join(pending)
                pending, size = [], 0
        yield b"".join(pending)


def decode_body(scope: Scope, receive: Receive) -> Receive:
    """`receive` for a request whose body may be compressed. It raises InvalidRequest for a body that is not what its
    header says, and UnknownEncoding for an encoding that is not supported."""
    if scope["type"] != "http":
        return receive
    given = b",".join(value for name, value in scope["headers"] if name == b"content-encoding").decode("latin-1")
    encoding = given.strip().lower()
    if encoding in ("", "identity"):
        return receive
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _DecodedBody(receive, _Zlib(encoding), encoding).receive
    if encoding == "zstd":
        return _DecodedBody(receive, _Zstd(), encoding).receive

    async def refuse() -> Message:
        raise UnknownEncoding(f"the body's Content-Encoding is {given[:40]!r}; gzip, deflate and zstd are supported")

    return refuse


class _DecodedBody:
    def __init__(self, receive: Receive, decoder: _Decoder, encoding: str) -> None:
        self._receive, self._decoder, self._encoding = receive, decoder, encoding
        self._parts: Iterator[bytes] = iter(())  # of the last message
        self._has_bytes, self._has_more, self._is_over = False, True, False

    async def receive(self) -> Message:
        """The next message. A cancelled call loses nothing: readers with a deadline cancel one and call again."""
        if self._is_over:
            return await self._receive()
        await asyncio.sleep(0)  # other requests' turn
        try:
            while (part := next(self._parts, None)) is None:
                if not self._has_more:
                    if self._has_bytes and not self._decoder.is_complete:
                        raise ValueError("its end is missing")
                    self._is_over = True
                    return {"type": "http.request", "body": b"", "more_body": False}
                message = await self._receive()
                if message["type"] != "http.request":
                    self._is_over = True
                    return message
                content, self._has_more = message.get("body", b""), message.get("more_body", False)
                self._has_bytes = self._has_bytes or bool(content)
                self._parts = self._decoder.parts(content)
        except ValueError as error:
            raise InvalidRequest(f"the body is not {self._encoding}: {error}") from None
        return {"type": "http.request", "body": part, "more_body": True}


def _window_bits(content: bytes) -> int:
    """zlib's parameter for a deflate body that begins with `content`."""
    has_header = content[0] & 0x0F == 8 and (len(content) < 2 or (content[0] << 8 | content[1]) % 31 == 0)
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
