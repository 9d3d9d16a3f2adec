"""A frame as it travels between processes: what arrives is what was sent."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncGenerator

import msgpack
import numpy as np
import pytest

from app.deployments.rpc import frames as module
from app.deployments.rpc.frames import FrameHub, HeartbeatTimeout, pack_frame, unpack_frame, with_heartbeat
from app.deployments.rpc.transport import PROTOCOL, ReplicaGone, ReplicaUnreachable, check_protocol
from app.engine.errors import EngineFailure, InvalidRequest, NotReady, QueueFull
from app.engine.request import RequestTiming, RequestUsage, TokenChunk, TokenLogprobs, Usage
from tests import seeds


def random_chunk(rng: np.random.Generator) -> TokenChunk:
    request_id, token_ids = f"r{rng.integers(99)}/1", tuple(rng.integers(0, 50_000, rng.integers(4)).tolist())
    logprobs = tuple(TokenLogprobs(token_id, -1.5, ((token_id, -1.5),)) for token_id in token_ids)
    kinds = (
        TokenChunk(request_id, token_ids),
        TokenChunk(request_id, token_ids, logprobs),
        TokenChunk(request_id, token_ids, usage=Usage(3, 0, 1)),
        TokenChunk(request_id, token_ids, finish_reason="stop", matched_stop=7, usage=Usage(3, 2, 1)),
        TokenChunk(request_id, finish_reason="abort"),
        TokenChunk(request_id, finish_reason="error", error=NotReady("away", retry_after_s=2)),
        TokenChunk(request_id, finish_reason="error", error=EngineFailure("it broke", computing=["a/1", request_id])),
        TokenChunk(request_id, finish_reason="error", error=InvalidRequest("half a pair: \ud83d", param="messages")),
        TokenChunk(request_id, finish_reason="stop", usage=Usage(3, 0, 0), embedding=rng.bytes(64)),
        TokenChunk(request_id, token_ids, finish_reason="length", request_usage=RequestUsage(3, 2, 1, 1, 2**40, 5, 6)),
    )
    return kinds[rng.integers(len(kinds))]


def test_a_frame_arrives_as_it_was_sent() -> None:
    rng = seeds.rng()
    chunks = [random_chunk(rng) for _ in range(200)]
    arrived = unpack_frame(pack_frame(chunks))
    for chunk, before in zip(arrived, chunks, strict=True):
        assert chunk._replace(error=None) == before._replace(error=None)
        assert (type(chunk.error), str(chunk.error)) == (type(before.error), str(before.error))
        assert chunk.error is None or vars(chunk.error) == vars(before.error)
        assert type(chunk.token_ids) is tuple
        assert type(chunk.logprobs) is tuple


def test_every_field_of_a_chunk_travels() -> None:
    """A field that is added to one of these classes needs a place in a frame."""
    every = TokenChunk(
        "a/1", (5,), (TokenLogprobs(5, -1.0, ((5, -1.0), (6, -2.0))),), "error", 5, Usage(1, 2, 3), NotReady("away"),
        b"vector", RequestUsage(1, 2, 3, 4, 5, 6, 7), (TokenLogprobs(5, -1.0, ((5, -1.0),), 3),),
        RequestTiming(1, 2, 3, 4, 5),
    )  # fmt: skip
    assert all(getattr(every, name) for name in TokenChunk.__match_args__)
    (again,) = unpack_frame(pack_frame([every]))
    assert str(again.error) == str(every.error)
    assert again._replace(error=None) == every._replace(error=None)


def test_an_error_of_a_class_that_an_ingress_does_not_know_travels_as_its_nearest_known_one() -> None:
    class Particular(QueueFull):
        pass

    chunk = TokenChunk("a/1", finish_reason="error", error=Particular("full", retry_after_s=3))
    (again,) = unpack_frame(pack_frame([chunk]))
    assert type(again.error) is QueueFull
    assert again.error.retry_after_s == 3


def test_tokens_alone_travel_as_plain_arrays() -> None:
    assert msgpack.unpackb(pack_frame([TokenChunk("a/1", (5, 6))])) == [["a/1", [5, 6]]]
    assert unpack_frame(pack_frame([])) == []


@pytest.mark.parametrize(
    "packed",
    [
        pickle.dumps([("a/1", (5, 6))]),
        b"",
        msgpack.packb([["a/1"]]),
        msgpack.packb([["a/1", [], [], "error", None, None, '["os", "x", {}]', b"", None]]),
        pack_frame([TokenChunk("a/1", (5, 6))])[:-1],
    ],
    ids=["pickle", "empty", "short", "class", "cut"],
)
def test_bytes_that_are_no_frame_are_refused_and_run_nothing(packed: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        unpack_frame(packed)


def test_ray_need_not_read_a_frame() -> None:
    assert type(pack_frame([TokenChunk("a/1", (5, 6))])) is bytes


async def test_a_link_without_news_carries_heartbeats_and_ends_when_it_was_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    hub = FrameHub()
    frames = hub.frames("link", lambda: 0.05)
    assert await anext(frames) == []
    hub.register("link", "a/1")
    for _ in range(20):  # for as long as a request waits
        assert await anext(frames) == []
    hub.deliver([TokenChunk("a/1", finish_reason="stop")])
    assert [chunk.finish_reason for chunk in await anext(frames)] == ["stop"]
    rest = [frame async for frame in frames]
    assert rest == [[] for _ in rest]


async def test_a_link_on_which_nothing_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.005)
    ended = asyncio.Event()

    async def items() -> AsyncGenerator[int]:
        try:
            await asyncio.sleep(0.05)  # attaching takes what it takes: the first is not missed
            for number in range(3):
                yield number
            await asyncio.Event().wait()
        finally:
            ended.set()

    reader = with_heartbeat(items())
    assert [await anext(reader) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ReplicaUnreachable, match="no heartbeat of the replica"):
        await anext(reader)
    async with asyncio.timeout(60):
        await ended.wait()


async def test_what_is_heard_ends_and_fails_as_it_does() -> None:
    async def items(error: Exception | None) -> AsyncGenerator[int]:
        yield 1
        if error is not None:
            raise error

    assert [item async for item in with_heartbeat(items(None))] == [1]
    with pytest.raises(ReplicaGone, match="dead"):
        [item async for item in with_heartbeat(items(ReplicaGone("dead")))]


async def test_a_reader_that_was_stopped_itself_has_missed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    calls: list[int] = []
    silence = HeartbeatTimeout(lambda: calls.append(1))
    for _ in range(3):
        time.sleep(0.1)  # the loop does not run: ten heartbeats
        await asyncio.sleep(0)
        silence.reset()
    assert calls == []
    async with asyncio.timeout(60):
        while not calls:
            await asyncio.sleep(0.01)
    silence.close()


def test_a_reader_of_another_protocol_is_refused_as_its_own_trouble() -> None:
    check_protocol(PROTOCOL)
    for other in (0, PROTOCOL + 1):
        with pytest.raises(ReplicaUnreachable, match=f"protocol {other} and the replica {PROTOCOL}"):
            check_protocol(other)
