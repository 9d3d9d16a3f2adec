"""A frame as it travels between processes: what arrives is what was sent."""

from __future__ import annotations

import pickle

import numpy as np

from app.deployments.links.frames import pack_frame, unpack_frame
from app.engine.errors import NotReady
from app.engine.request import TokenChunk, TokenLogprobs, Usage
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
    )
    return kinds[rng.integers(len(kinds))]


def test_a_frame_arrives_as_it_was_sent() -> None:
    rng = seeds.rng()
    chunks = [random_chunk(rng) for _ in range(200)]
    arrived = unpack_frame(pack_frame(chunks))
    assert arrived == chunks
    for chunk, before in zip(arrived, chunks, strict=True):
        assert (type(chunk.error), str(chunk.error)) == (type(before.error), str(before.error))  # not compared by ==


def test_tokens_alone_travel_as_plain_tuples() -> None:
    assert pickle.loads(pack_frame([TokenChunk("a/1", (5, 6))])) == [("a/1", (5, 6))]
    assert unpack_frame(pack_frame([])) == []


def test_ray_need_not_read_a_frame() -> None:
    assert type(pack_frame([TokenChunk("a/1", (5, 6))])) is bytes
