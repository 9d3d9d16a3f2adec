"""A step packed on the host and unpacked in a program: nothing is lost, and every token is in exactly one task."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from app.engine.xla.step import PREFILL_TILE, Bucket, StepAdapters, pack, unpack
from app.kernels.paged_attention.xla import attention_tasks, tiles_of
from app.kernels.sgmv.xla import SEGMENT_TOKENS
from load_tests.engine.steps import Piece, forward_batch
from tests.seeds import rng

BUCKET = Bucket(64, 8, PREFILL_TILE, 8)


def _random_pieces(generator: np.random.Generator) -> list[Piece]:
    count = int(generator.integers(1, 9))
    lengths = generator.multinomial(int(generator.integers(0, 64 - count)), np.ones(count) / count) + 1
    return [
        Piece(generator.integers(0, 9, n), int(generator.integers(0, 40)), generator.integers(0, 64, 8), number)
        for number, n in enumerate(lengths)
    ]


def test_any_division_of_tokens_fits_its_bucket_and_comes_back() -> None:
    generator = rng()
    for _ in range(200):
        batch = forward_batch(_random_pieces(generator), 16)
        count = len(batch.token_ids)
        rows = generator.integers(0, 9, count).astype(np.int32)
        own = generator.integers(0, 9, count).astype(np.int32)
        flat = pack(batch, BUCKET, 1024, StepAdapters(37, rows, 3, own, 2))
        assert len(flat) == BUCKET.size
        step = unpack(flat, BUCKET)
        for name in ("token_ids", "positions"):
            np.testing.assert_array_equal(getattr(step, name)[:count], getattr(batch, name))
        np.testing.assert_array_equal(step.extra_rows[:count], rows)
        np.testing.assert_array_equal(step.expert_slots[:count], own)
        assert int(step.most_pages) == 2
        np.testing.assert_array_equal(step.sample_rows[: len(batch.sample_rows)], batch.sample_rows)
        assert (step.num_tokens, step.num_extra_tokens, step.segments.widest) == (count, 3, 37)
        queries, lines = step.queries, np.asarray(step.segments.lines[: step.segments.num_segments])
        np.testing.assert_array_equal(queries.kv_slots[:count], batch.kv_slots)
        assert (np.asarray(queries.kv_slots[count:]) == 1024).all()
        num_sequences, width = batch.block_tables.shape
        np.testing.assert_array_equal(queries.block_tables[:num_sequences, :width], batch.block_tables)
        # Every token of an adapter is in one segment, with its adapter, and no base token is in any.
        slots = np.repeat(batch.run_adapter_slots, np.diff(batch.run_starts))
        assert (lines[:, 1] - lines[:, 0] <= SEGMENT_TOKENS).all()
        tokens = [(t, slot) for first, end, slot in lines.tolist() for t in range(first, end)]
        assert tokens == [(t, slot) for t, slot in enumerate(slots.tolist()) if slot]


@pytest.mark.parametrize("tile", [1, 3, 16])
def test_every_query_is_in_one_task_of_its_own_sequence(tile: int) -> None:
    generator = rng()
    starts = np.cumsum([0, *generator.integers(1, 30, 5)]).astype(np.int32)
    rows = []
    for sequence, first in attention_tasks(starts, tile).tolist():
        end = min(starts[sequence] + first + tile, starts[sequence + 1])
        assert end > starts[sequence] + first
        rows += range(starts[sequence] + first, end)
    assert rows == list(range(starts[-1]))
    assert attention_tasks(np.zeros(1, np.int32), tile).shape == (0, 2)


def test_tiles_say_what_each_query_sees_and_where_it_is() -> None:
    batch = forward_batch(_random_pieces(rng()), 16)
    count = len(batch.token_ids)
    step = unpack(
        jax.numpy.array(
            pack(batch, BUCKET, 1024, StepAdapters(0, np.zeros(count, np.int32), 0, np.zeros(count, np.int32), 0))
        ),
        BUCKET,
    )
    tiles = tiles_of(step.queries, BUCKET.tokens, BUCKET.tile)
    flat_rows, visible = np.asarray(tiles.rows).reshape(-1), np.asarray(tiles.visible).reshape(-1)
    places = np.asarray(tiles.places)[:count]
    np.testing.assert_array_equal(flat_rows[places], np.arange(count))
    np.testing.assert_array_equal(visible[places], batch.positions + 1)
    assert (np.delete(visible, places) == 0).all()
    sequences = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_starts))
    of_tile = np.asarray(tiles.tables)[places // BUCKET.tile]
    np.testing.assert_array_equal(of_tile, np.asarray(step.queries.block_tables)[sequences])
