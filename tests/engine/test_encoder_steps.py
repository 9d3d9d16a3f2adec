"""What an engine gives an encoder's backend: whole texts, as many as fit into a step, and no KV memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.errors import InvalidRequest
from app.engine.models.spec import EncoderSpec
from app.engine.request import PoolingParams
from app.engine.warm_up import warm_up
from tests.engine.driving import ADAPTERS, run
from tests.fakes import FakeBackend, fake_request, fake_spec
from tests.seeds import rng

MEAN = PoolingParams("mean")
MOST = 40


class FakeEncoder(FakeBackend):
    """Its embedding of a text is made of the text's length, first token and adapter slot's rows."""

    def __init__(self, rows: int = 64) -> None:
        spec = replace(fake_spec(max_positions=MOST), encoder=EncoderSpec(MOST, 0, 2), pooling="mean")
        super().__init__(BackendLimits(0, 16, rows, 8, 4, can_embed=True), spec)
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        assert batch.pooling is not None
        assert batch.kv_slots.size == batch.block_tables.size == batch.sample_rows.size == 0
        starts, slots = batch.query_starts, np.repeat(batch.run_adapter_slots, np.diff(batch.run_starts))
        np.testing.assert_array_equal(np.diff(starts), batch.seq_lens)
        self.sizes.append(int(starts[-1]))
        sums = batch.pooling.sums.copy()
        for q, (first, end) in enumerate(batch.pooling.ranges.tolist()):
            assert (first, end) == (starts[q], starts[q + 1])
            np.testing.assert_array_equal(batch.positions[first:end], np.arange(end - first))
            row_start, rank = self._runs[int(slots[first])]
            numbers = [end - first, batch.token_ids[first], sum(self._rows[row_start : row_start + rank]), 1.0]
            sums[q] += (end - first) * np.array(numbers)
        return ForwardOutput(np.zeros(0, np.int32), np.zeros(0, np.float32), (), sums=sums)


def test_texts_are_computed_whole_and_steps_are_filled() -> None:
    backend = FakeEncoder()
    engine = Engine(backend, EngineConfig(max_num_batched_tokens=50, max_num_seqs=7), lambda: 0.0)
    generator, expected = rng(), {}
    for index in range(60):
        token_ids = generator.integers(8, 60, int(generator.integers(1, MOST + 1))).tolist()
        adapter = [None, *ADAPTERS][index % 6]
        name = f"r{index}"
        engine.submit(fake_request(name, token_ids, adapter, tenant_id=f"t{index % 3}", pooling=MEAN), adapter)
        rows = 0.0 if adapter is None else float(next(iter(adapter.weights.values())).a.sum())
        vector = np.array([len(token_ids), token_ids[0], rows, 1.0])
        expected[name] = (vector / np.linalg.norm(vector), len(token_ids))
    chunks = run(engine)
    for name, (vector, num_tokens) in expected.items():
        (chunk,) = chunks[name]
        np.testing.assert_allclose(np.frombuffer(chunk.embedding, "<f4"), vector, rtol=1e-6)
        assert chunk.usage is not None
        assert (chunk.usage.prompt_tokens, chunk.usage.cached_tokens) == (num_tokens, 0)
    assert max(backend.sizes) <= 50
    assert len(backend.sizes) < 60, "texts share steps"
    assert engine.stats().num_preemptions == 0


def test_a_text_whose_adapter_is_on_its_way_waits_for_it_whole() -> None:
    backend = FakeEncoder()
    engine = Engine(backend, EngineConfig(max_num_batched_tokens=MOST), lambda: 0.0)
    backend.unready = {1}
    engine.submit(fake_request("with", [9] * MOST, ADAPTERS[0], pooling=MEAN), ADAPTERS[0])
    engine.submit(fake_request("without", [9] * MOST, pooling=MEAN))
    chunks = run(engine)
    assert {name: of[0].finish_reason for name, of in chunks.items()} == {"with": "stop", "without": "stop"}
    assert backend.sizes == [MOST, MOST]


def test_an_encoder_generates_nothing_and_warms_up_all_the_same() -> None:
    backend = FakeEncoder(rows=0)
    engine = Engine(backend, EngineConfig(max_num_batched_tokens=MOST), lambda: 0.0)
    with pytest.raises(InvalidRequest, match="is an encoder"):
        engine.submit(fake_request("r", [9]))
    warm_up(engine)
    assert backend.sizes
    assert not engine.stats().residents
