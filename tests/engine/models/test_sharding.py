"""Shards of linear modules: together they are the whole, and each holds whole heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.errors import ConfigError
from app.engine.models.linear_modules import LinearModule, layer_linear_modules
from app.engine.models.sharding import check_shards, shard_columns, shard_module, whole_output
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec
from tests.engine.adapters.random_adapters import tiny_spec


def products(heads: int, kv_heads: int, head_dim: int, wide: int) -> tuple[LinearModule, ...]:
    spec = tiny_spec()
    attention = AttentionSpec(heads, kv_heads, head_dim, 1.0, spec.layers[0].attention.rope)
    return layer_linear_modules(replace(spec, layers=(LayerSpec(attention, MlpSpec(wide)),)), 0)


def test_a_shard_holds_whole_heads_and_what_o_reads_of_them() -> None:
    qkv, o, gate_up, down = (shard_columns(product, 2) for product in products(4, 2, 3, 8))
    assert qkv["q_proj"].tolist() == o["o_proj"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert qkv["k_proj"].tolist() == qkv["v_proj"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert gate_up["up_proj"].tolist() == down["down_proj"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_kv_head_is_held_by_the_shards_whose_queries_read_it() -> None:
    qkv = products(8, 2, 3, 8)[0]
    assert shard_columns(qkv, 8)["k_proj"].tolist() == [[0, 1, 2]] * 4 + [[3, 4, 5]] * 4


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 5), st.integers(1, 3))
def test_shards_together_are_the_whole(
    log_shards: int, log_kv_heads: int, log_ratio: int, head_dim: int, wide: int
) -> None:
    shards, kv_heads = 1 << log_shards, 1 << log_kv_heads
    heads = max(shards, kv_heads << log_ratio)
    for product in products(heads, kv_heads, head_dim, wide * shards):
        check_shards((product,), shards, "tiny")
        one = shard_module(product, shards)
        for target, width, kept in zip(product.targets, product.widths, one.widths, strict=True):
            mine = shard_columns(product, shards)[target]
            if product.kind.split == "input":
                assert (mine.shape[1], kept) == (one.d_in, width)
                assert mine.reshape(-1).tolist() == list(range(product.d_in)), "each input is read by one shard"
                continue
            assert (mine.shape[1], one.d_in) == (kept, product.d_in)
            assert set(mine.reshape(-1).tolist()) == set(range(width))
            values = np.arange(width, dtype=np.float32)
            by_shard = np.full((shards, one.width()), np.nan, np.float32)
            by_shard[:, one.columns(target)] = values[mine]
            whole = whole_output(by_shard.reshape(-1), product, target, shards)
            assert whole.tolist() == values.tolist()


@pytest.mark.parametrize(("shards", "named"), [(3, "q_proj falls into 8"), (16, "o_proj falls into 8")])
def test_a_model_that_does_not_divide_is_refused_by_what_does_not(shards: int, named: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel {shards} does not divide tiny: {named} parts"):
        check_shards(products(8, 4, 3, 48), shards, "tiny")
