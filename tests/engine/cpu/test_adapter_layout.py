"""What writing an adapter needs to know is worked out once, before the step that writes it, and forgotten with it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.config import EngineConfig
from app.engine.cpu.adapter_layout import AdapterLayoutCache, row_bytes
from app.engine.errors import AdapterMismatch
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.pools.adapter_pool import rows_of
from tests.engine.adapters.random_adapters import random_adapter, tiny_spec
from tests.engine.driving import make_engine
from tests.fakes import fake_adapter, fake_request


def _adapter(*keys: LoraKey) -> LoraAdapter:
    pair = LoraPair(np.ones((3, 4), np.float32), np.ones((3, 4), np.float32))
    return LoraAdapter(fake_adapter("of several modules", 3).card, dict.fromkeys(keys, pair))


def test_ranks_stand_where_modules_are() -> None:
    rows = AdapterLayoutCache(tiny_spec(2)).of(_adapter(LoraKey(1, "k_proj"), LoraKey(0, "down_proj")))
    expected = np.zeros((2, 7), np.int32)
    expected[1, DENSE_TARGETS.index("k_proj")] = expected[0, DENSE_TARGETS.index("down_proj")] = 3
    np.testing.assert_array_equal(rows.ranks, expected)
    assert sorted(zip(rows.matrices.layers, rows.matrices.modules, strict=True)) == [(0, 6), (1, 1)]


def test_an_adapter_is_worked_out_once_and_forgotten_with_its_last_user() -> None:
    layouts, adapter = AdapterLayoutCache(tiny_spec(1)), _adapter(LoraKey(0, "q_proj"))
    rows = layouts.of(adapter)
    assert layouts.of(adapter) is rows
    assert layouts.of(_adapter(LoraKey(0, "q_proj"))) is not rows  # the same contents in memory of their own
    arrays = [weakref.ref(array) for array in rows.matrices.arrays]
    del rows, adapter
    gc.collect()
    assert not any(array() is not None for array in arrays)


@pytest.mark.parametrize("key", [LoraKey(2, "q_proj"), LoraKey(0, "q_proj", expert=1), LoraKey(0, "router")])
def test_modules_that_are_not_there_are_refused(key: LoraKey) -> None:
    with pytest.raises(AdapterMismatch, match=f"{key.target}.*layer {key.layer}"):
        AdapterLayoutCache(tiny_spec(2)).of(_adapter(LoraKey(0, "k_proj"), key))


@pytest.mark.parametrize("saved_in", ["F32", "BF16"])
def test_every_module_at_one_rank_takes_no_more_rows_than_the_rank_says(saved_in: str) -> None:
    spec = tiny_spec()
    layouts, alignment = AdapterLayoutCache(spec), EngineConfig().rank_alignment
    for rank in (*range(1, 18), 24, 33, 40):
        adapter = random_adapter(spec, rank, dtype=saved_in, saved_in=saved_in, alpha=rank)
        num_rows = layouts.of(adapter).num_rows
        assert rows_of(num_rows, 1) <= rows_of(rank, alignment) // (2 if saved_in == "BF16" else 1)
        assert num_rows >= rank // (2 if saved_in == "BF16" else 1)


def test_modules_and_ranks_that_an_adapter_has_not_take_no_rows() -> None:
    """tiny_spec's rank row, two layers of float32: five modules read 24 values, o 32, down 40; outputs are padded."""
    spec = tiny_spec()
    row = 4 * 2 * ((5 * 24 + 32 + 40) + (32 + 16 + 16 + 32 + 48 + 48 + 32))
    assert row_bytes(spec) == row
    layouts = AdapterLayoutCache(spec)
    q_and_v = 4 * 2 * (16 * (24 + 24) + 13 * (32 + 16))  # rank 13: panels of eight rows of a, rows of b
    assert layouts.of(random_adapter(spec, 13, ["q_proj", "v_proj"])).num_rows == -(-q_and_v // row) == 4
    one = random_adapter(spec, 64, ["k_proj"])
    assert layouts.of(one).num_rows == -(-64 * (24 + 16) * 4 * 2 // row)
    assert layouts.of(LoraAdapter(one.card, {})).num_rows == 1  # of what is no module of every token


def test_the_engine_prepares_an_adapter_when_it_is_named_not_when_it_is_written() -> None:
    engine, backend = make_engine()
    first, second = fake_adapter("first", 8), fake_adapter("second", 8)
    engine.submit(fake_request("r", [1, 2], first), first)
    brought = engine.load_adapter(second, fake_request("s", [1], second).adapter)
    assert [backend.prepared, backend.writes] == [[first, second], []]
    engine.step()
    assert brought.done()
    assert len(backend.writes) == 2
    assert backend.prepared == [first, second]
