"""Attention in JAX programs: the definition's, and memory is written where the step's keys and values belong."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from app.kernels.paged_attention import reference, xla
from app.kernels.paged_attention.xla import Queries
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.test_paged_attention import CASES, Case
from tests.pairwise import pairwise
from tests.seeds import rng

Floats = NDArray[np.float32]
LAYER, TOKENS = 1, 48
COUNTS = ([], [1], [1, 1, 1], [16, 1, 17], [5, 40], [33, 1])


class Setting(NamedTuple):
    """Random queries, new keys and values, and a memory [2, blocks, kv_heads, block_size, D] without them."""

    q: Floats
    k: Floats
    v: Floats
    keys: Floats
    values: Floats
    queries: Queries


def _setting(case: Case, counts: list[int], tile: int) -> Setting:
    """Sequences of these many new tokens; what no sequence holds in memory is NaN."""
    generator = rng()
    seq_lens = np.array([n + int(generator.integers(0, 60)) for n in counts], np.int32)
    per_group = xla.blocks_per_group(case.block_size)
    width = -(-int(seq_lens.max(initial=1)) // (case.block_size * per_group)) * per_group
    num_blocks = width * len(counts) + 1
    tables = generator.permutation(width * len(counts)).reshape(len(counts), width).astype(np.int32)
    shape = (2, num_blocks, case.kv_heads, case.block_size, case.head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    kv_slots = np.full(TOKENS, num_blocks * case.block_size, np.int32)
    at = 0
    for table, length, count in zip(tables, seq_lens, counts, strict=True):
        for position in range(length):
            block, offset = table[position // case.block_size], position % case.block_size
            if position < length - count:
                keys[LAYER, block, :, offset] = normal(generator, case.kv_heads, case.head_dim)
                values[LAYER, block, :, offset] = normal(generator, case.kv_heads, case.head_dim)
            else:
                kv_slots[at] = block * case.block_size + offset
                at += 1
    starts = np.cumsum([0, *counts]).astype(np.int32)
    found = xla.attention_tasks(starts, tile)
    tasks = np.zeros((TOKENS, 2), np.int32)
    tasks[: len(found)] = found

    def padded(values: NDArray[np.int32], length: int) -> jax.Array:
        return jnp.array(np.concatenate([values, np.zeros(length - len(values), np.int32)]))

    all_tables = np.zeros((8, width), np.int32)
    all_tables[: len(tables)] = tables
    queries = Queries(
        jnp.array(kv_slots), jnp.array(tasks), jnp.int32(len(found)), padded(starts, 9), padded(seq_lens, 8),
        jnp.array(all_tables),
    )  # fmt: skip
    sizes = case.heads * case.head_dim, case.kv_heads * case.head_dim
    q, k, v = (normal(generator, TOKENS, size) for size in (sizes[0], sizes[1], sizes[1]))
    return Setting(q, k, v, keys, values, queries)


def _expected(setting: Setting, case: Case, counts: list[int]) -> tuple[Floats, Floats, NDArray[np.float64]]:
    """keys and values with the new ones, and what is attended."""
    keys, values, total = setting.keys.copy(), setting.values.copy(), sum(counts)
    for t, place in enumerate(np.asarray(setting.queries.kv_slots)[:total]):
        block, offset = place // case.block_size, place % case.block_size
        keys[LAYER, block, :, offset] = setting.k[t].reshape(case.kv_heads, -1)
        values[LAYER, block, :, offset] = setting.v[t].reshape(case.kv_heads, -1)
    queries = setting.queries
    attended = reference.paged_attention(
        setting.q[:total].reshape(total, case.heads, case.head_dim), keys[LAYER], values[LAYER],
        np.asarray(queries.query_starts)[: len(counts) + 1], np.asarray(queries.seq_lens)[: len(counts)],
        np.asarray(queries.block_tables), case.head_dim**-0.5, case.window,
        sinks=case.sinks if case.has_sinks else None,
    )  # fmt: skip
    return keys, values, attended.reshape(total, case.heads * case.head_dim)


def _in_xla(
    setting: Setting, scale: jax.Array, window: jax.Array, sinks: jax.Array, tile: int
) -> tuple[jax.Array, ...]:
    tiles = xla.tiles_of(setting.queries, TOKENS, tile)
    return xla.store_and_attend(*setting, tiles, jnp.int32(LAYER), scale, window, sinks)


@pairwise({"counts": COUNTS, "case": CASES}, strength=1)
def test_it_is_the_definition_and_stores_what_is_new(case: Case, counts: list[int]) -> None:
    tile = 1 if counts and max(counts) == 1 else 16
    setting = _setting(case, counts, tile)
    keys, values, attended = _expected(setting, case, counts)
    scale, window = jnp.float32(case.head_dim**-0.5), jnp.int32(case.window or 0)
    run = jax.jit(partial(_in_xla, tile=tile))
    out, new_keys, new_values = map(np.asarray, run(setting, scale, window, jnp.array(case.sinks)))
    np.testing.assert_array_equal(new_keys, keys)
    np.testing.assert_array_equal(new_values, values)
    assert relative_error(out[: len(attended)], attended) < 4 * TOLERANCE["float32"]
