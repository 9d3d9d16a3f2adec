"""Paged attention in JAX: decode and chunked prefill in one program, for any lengths.

Queries are taken in tiles of one sequence each. Keys come in groups of `KEY_GROUP` positions in order, with an online
softmax (Milakov & Gimelshein 2018); the loop over groups has a dynamic end, so no program is compiled per length. A
group that a query does not see changes nothing, exactly: its scores are -inf, its weights 0 and the rescaling 1. Memory
beyond a sequence's keys, which may hold anything, is replaced by zeros before it is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

#: Keys per step of the online softmax, where the block size divides it.
KEY_GROUP = 128
_FAR = 1 << 30
_LOW = -1e30  # a maximum before any key: finite, so that the first rescaling is exp(0) or exp(-1e30) and never NaN


class Queries(NamedTuple):
    """A step's queries, int32. T tokens; J tasks, of which num_tasks are real.

    kv_slots: [T], beyond the memory for padding. tasks: [J, 2] (sequence, first query of it), each for as many queries
    as a tile has. query_starts: [B + 1]. seq_lens: [B]. block_tables: [B, N], N a multiple of `blocks_per_group`.
    """

    kv_slots: Array
    tasks: Array
    num_tasks: Array
    query_starts: Array
    seq_lens: Array
    block_tables: Array


class Tiles(NamedTuple):
    """Queries in tiles [W, Q]. rows: their token rows. visible: keys each one sees without a window, 0 for padding.

    places: [T], a token's place among the W * Q queries. tables: [W, N], the block table of each tile's sequence.
    """

    rows: Array
    visible: Array
    places: Array
    tables: Array


def blocks_per_group(block_size: int) -> int:
    """How many KV blocks one step reads; block tables are padded to a multiple of it."""
    return max(1, KEY_GROUP // block_size)


def attention_tasks(query_starts: NDArray[np.int32], tile: int) -> NDArray[np.int32]:
    """[J, 2], `Queries.tasks`: pieces of at most `tile` queries of one sequence. query_starts: [B + 1]."""
    counts = -(-np.diff(query_starts) // tile)
    sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.arange(len(sequences), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([sequences, first * tile], axis=1).astype(np.int32)


def tiles_of(queries: Queries, num_tokens: int, tile: int) -> Tiles:
    """Tiles of `tile` queries; the same for every layer."""
    sequence, first = queries.tasks[:, :1], queries.tasks[:, 1:]  # [J, 1]
    rows = queries.query_starts[sequence] + first + jnp.arange(tile, dtype=jnp.int32)  # [J, tile]
    end = queries.query_starts[sequence + 1]
    is_real = (rows < end) & (jnp.arange(len(queries.tasks), dtype=jnp.int32)[:, None] < queries.num_tasks)
    visible = jnp.where(is_real, queries.seq_lens[sequence] - end + rows + 1, 0)
    targets = jnp.where(is_real, rows, num_tokens).reshape(-1)  # beyond the end: dropped
    places = jnp.zeros(num_tokens, jnp.int32).at[targets].set(jnp.arange(rows.size, dtype=jnp.int32), mode="drop")
    return Tiles(jnp.where(is_real, rows, 0), visible, places, queries.block_tables[sequence[:, 0]])


def store_and_attend(
    q: Array, k: Array, v: Array, keys: Array, values: Array, queries: Queries, tiles: Tiles, layer: Array,
    scale: Array, window: Array, sinks: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Write k and v to their places; then softmax(scale * q K^T) V over the keys that each query sees.

    q: [T, heads * D]; k, v: [T, kv_heads * D]. keys, values: [L, blocks, kv_heads, block_size, D]. layer: scalar int32.
    scale: scalar; window: scalar int32, the number of last visible keys; 0 is all. sinks: [heads], one more score of
    each head that has no value, or [0]. Returns attention outputs [T, heads * D] (padding rows are arbitrary), keys and
    values.
    """
    num_kv_heads, head_dim = keys.shape[2], keys.shape[4]
    keys, values = (
        store(memory, new.reshape(-1, num_kv_heads, head_dim), layer, queries.kv_slots)
        for memory, new in ((keys, k), (values, v))
    )
    rows = q.reshape(len(q), -1, head_dim)[tiles.rows]
    attended = attend(rows, keys, values, layer, tiles, scale, window, sinks)
    return attended.reshape(-1, q.shape[1])[tiles.places], keys, values


def store(memory: Array, rows: Array, layer: Array, kv_slots: Array) -> Array:
    """Write rows [T, kv_heads, D] into memory; padding lands nowhere."""
    block_size = memory.shape[3]
    return memory.at[layer, kv_slots // block_size, :, kv_slots % block_size].set(rows, mode="drop")


def attend(
    q: Array, keys: Array, values: Array | int, layer: Array, tiles: Tiles, scale: Array, window: Array, sinks: Array
) -> Array:
    """Attention outputs [W, Q, heads, values' D] of q [W, Q, heads, D]; padding rows are zeros.

    values: memory like that of keys, or the number of each key's first elements that are its value.
    """
    num_tiles, num_queries, num_heads, head_dim = q.shape
    num_layers, num_blocks, num_kv_heads, block_size, _ = keys.shape
    group = num_heads // num_kv_heads
    per_group = blocks_per_group(block_size)
    num_keys = per_group * block_size
    rows = num_queries * group
    # [W, kv_heads, Q * group, D]: the rows that share a KV head.
    q = q.reshape(num_tiles, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_tiles, num_kv_heads, rows, head_dim)
    keys = keys.reshape(num_layers * num_blocks * num_kv_heads, block_size, head_dim)
    if isinstance(values, int):
        value_dim = values
    else:
        value_dim = values.shape[4]
        values = values.reshape(num_layers * num_blocks * num_kv_heads, block_size, value_dim)
    visible, reach = tiles.visible, jnp.where(window > 0, window, _FAR)
    row_visible = jnp.repeat(visible, group, axis=1)[:, None, :, None]  # [W, 1, rows, 1]
    tile_end = visible.max(axis=1)[:, None, None, None]  # [W, 1, 1, 1]
    first_key = jnp.where(visible > 0, jnp.maximum(visible - reach, 0), _FAR).min()
    last_group = (visible.max() + num_keys - 1) // num_keys
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]

    def step(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, weighted = state
        blocks = lax.dynamic_slice_in_dim(tiles.tables, index * per_group, per_group, axis=1)  # [W, per_group]
        where = (layer * num_blocks + blocks[:, None, :]) * num_kv_heads + heads  # [W, kv_heads, per_group]

        def rows_of(memory: Array) -> Array:
            blocks = memory.at[where].get(mode="promise_in_bounds")
            return blocks.reshape(num_tiles, num_kv_heads, num_keys, -1)

        k = rows_of(keys)
        v = k[..., :value_dim] if isinstance(values, int) else rows_of(values)
        key = index * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        v = jnp.where(key[:, None] < tile_end, v, 0.0)
        scores = jnp.einsum("wkrd,wknd->wkrn", q, k, precision=lax.Precision.HIGHEST) * scale
        scores = jnp.where((key < row_visible) & (key >= row_visible - reach), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        p, keep = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        added = jnp.einsum("wkrn,wknd->wkrd", p, v, precision=lax.Precision.HIGHEST)
        return new_top, total * keep + p.sum(axis=-1, keepdims=True), weighted * keep + added

    shape = (num_tiles, num_kv_heads, rows)
    top, total = jnp.full((*shape, 1), _LOW, jnp.float32), jnp.zeros((*shape, 1), jnp.float32)
    if sinks.size:  # as if each head had seen a key of this score, whose value is zero
        of_row = jnp.tile(sinks.reshape(num_kv_heads, group), (1, num_queries))  # [kv_heads, rows]
        top, total = jnp.broadcast_to(of_row[None, :, :, None], top.shape), jnp.ones_like(total)
    start = (top, total, jnp.zeros((*shape, value_dim), jnp.float32))
    _, total, weighted = lax.fori_loop(first_key // num_keys, last_group, step, start)
    out = weighted / jnp.where(total > 0, total, 1.0)
    out = out.reshape(num_tiles, num_kv_heads, num_queries, group, value_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_tiles, num_queries, num_heads, value_dim)
