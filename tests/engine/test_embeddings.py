"""Requests that end with a vector: whatever else is in the batch, and however the text is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.engine.backend import BackendLimits
from app.engine.batch_builder import pooled_range
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.errors import AdapterOverflow, ContextOverflow, InvalidRequest, UnsupportedField
from app.engine.models.spec import Pooling
from app.engine.request import PoolingParams, SamplingParams
from app.engine.scheduling.scheduler import embedding
from tests.engine.driving import ADAPTERS, make_engine, run
from tests.fakes import FakeBackend, fake_embedding, fake_request
from tests.seeds import rng

LAST, MEAN = PoolingParams("last"), PoolingParams("mean")


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_kv_blocks", [10, 64])
def test_a_text_has_one_embedding_in_chunks_from_the_cache_after_preemption_and_beside_others(
    num_kv_blocks: int, enable_prefix_caching: bool
) -> None:
    generator = rng()
    prefix = tuple(generator.integers(8, 60, 17).tolist())
    submitted = []
    for index in range(60):
        adapter = [None, *ADAPTERS][index % 5]
        token_ids = prefix[: int(generator.integers(0, 18))] + tuple(generator.integers(8, 60, 1 + index % 20).tolist())
        pooling = [LAST, MEAN, PoolingParams("mean", 3), None][index % 4]
        sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        submitted.append((fake_request(f"r{index}", token_ids, adapter, sampling=sampling, pooling=pooling), adapter))
    engine, _ = make_engine(
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        enable_prefix_caching=enable_prefix_caching,
    )
    for request, adapter in submitted:
        engine.submit(request, adapter)
    chunks = run(engine)
    for request, adapter in submitted:
        if request.pooling is not None:
            (chunk,) = chunks[request.request_id]
            assert chunk.embedding == fake_embedding(request, adapter)
            assert (chunk.finish_reason, chunk.token_ids, chunk.error) == ("stop", (), None)
            assert chunk.usage is not None
            assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (len(request.token_ids), 0)
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_kv_blocks == 10)
    assert stats.num_finished == 60


def test_the_last_token_starts_from_cached_blocks_and_a_mean_computes_every_token() -> None:
    engine, _ = make_engine()
    token_ids = list(range(8, 48))
    cached = {}
    for name, pooling in (("first", LAST), ("again", LAST), ("mean", MEAN)):
        engine.submit(fake_request(name, token_ids, pooling=pooling))
        (chunk,) = run(engine)[name]
        assert chunk.embedding == fake_embedding(fake_request(name, token_ids, pooling=pooling), None)
        assert chunk.usage is not None
        cached[name] = chunk.usage.cached_tokens
    assert cached == {"first": 0, "again": 32, "mean": 0}


def test_an_embedding_that_is_no_number_ends_its_own_request() -> None:
    engine, backend = make_engine()
    backend.overflowing = {1}
    for name, adapter in (("bad", ADAPTERS[0]), ("good", None)):
        engine.submit(fake_request(name, [9, 10, 11], adapter, pooling=MEAN), adapter)
    chunks = run(engine)
    assert isinstance(chunks["bad"][-1].error, AdapterOverflow)
    assert chunks["bad"][-1].embedding == b""
    assert len(chunks["good"][-1].embedding) == 16


def test_what_cannot_be_embedded_is_refused_in_words() -> None:
    engine, _ = make_engine(max_model_len=40, num_kv_blocks=4)
    with pytest.raises(ContextOverflow, match="41 tokens but the context holds 40"):
        engine.submit(fake_request("long", [9] * 41, pooling=LAST))
    with pytest.raises(ContextOverflow, match="33 tokens but the KV memory holds 32"):
        engine.submit(fake_request("longer than memory", [9] * 33, pooling=LAST))
    with pytest.raises(InvalidRequest, match="dimensions is 5 but must be an integer from 1 to 4"):
        engine.submit(fake_request("wide", [9], pooling=PoolingParams("last", 5)))
    with pytest.raises(InvalidRequest, match="pooling is 'cls'"):
        engine.submit(fake_request("cls", [9], pooling=PoolingParams("cls")))
    with pytest.raises(InvalidRequest, match="resume_token_ids"):
        engine.submit(fake_request("resumed", [9], pooling=LAST, resume_token_ids=[9]))
    assert not engine.has_work
    other = Engine(FakeBackend(BackendLimits(8, 8, 8, 8, 2)), EngineConfig())
    with pytest.raises(UnsupportedField, match=r"engine\.cpu"):
        other.submit(fake_request("elsewhere", [9], pooling=LAST))


@pytest.mark.parametrize("method", ["last", "mean", "cls"])
def test_pooled_rows_of_chunks_are_those_of_the_whole(method: Pooling) -> None:
    whole = list(range(*pooled_range(method, 9, 0, 9)))
    assert whole == {"last": [8], "mean": list(range(9)), "cls": [0]}[method]
    for cut in range(1, 9):
        parts = [row for start, end in ((0, cut), (cut, 9)) for row in range(*pooled_range(method, 9, start, end))]
        assert parts == whole


def test_an_embedding_has_length_one_also_with_fewer_dimensions() -> None:
    sums = np.array([3.0, 4.0, 12.0, 1e-300])
    for params, expected in ((LAST, [3 / 13, 4 / 13, 12 / 13, 0]), (replace(MEAN, num_dimensions=2), [0.6, 0.8])):
        vector = embedding(sums, 7, params)
        assert vector is not None
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), expected, rtol=1e-6, atol=1e-30)
    assert embedding(np.zeros(2), 1, LAST) == bytes(8)
    assert embedding(np.array([1.0, np.nan]), 1, LAST) is None
