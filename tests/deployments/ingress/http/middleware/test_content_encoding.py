"""A compressed body through the interface that middleware and routes read it by."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable

import pytest
import zstandard
from starlette.types import Message

from app.deployments.ingress.http.middleware.content_encoding import decode_body
from tests.seeds import rng

PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("encoding", sorted(PACK))
async def test_a_read_that_is_given_up_loses_nothing(encoding: str) -> None:
    """A reader with a deadline cancels a call that takes long and calls again: the rest is decoded, too."""
    content = rng().integers(0, 256, 300_000).astype("u1").tobytes()
    packed = PACK[encoding](content)
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    receive = decode_body({"type": "http", "headers": [(b"content-encoding", encoding.encode())]}, arrived.get)
    body, pieces = b"", [packed[:1000], packed[1000:200_000], packed[200_000:]]
    for index, piece in enumerate(pieces):
        with contextlib.suppress(TimeoutError):  # once no more has arrived
            while True:
                body += (await asyncio.wait_for(receive(), 0.01))["body"]
        arrived.put_nowait({"type": "http.request", "body": piece, "more_body": index + 1 < len(pieces)})
    while (message := await receive())["more_body"]:
        body += message["body"]
    assert body == content
    arrived.put_nowait({"type": "http.disconnect"})
    assert await receive() == {"type": "http.disconnect"}
