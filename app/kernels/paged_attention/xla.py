"""Paged attention in JAX: decode and chunked prefill in one program, whatever the lengths.

In: queries in tiles, one sequence per tile, and the KV memory of all layers. Out: one row per query. Keys come
in groups of `key_group` positions in order, with an online softmax (Milakov & Gimelshein 2018); the loop over
groups has a dynamic end, so no program is compiled per length. A group that a query does not see changes
nothing, exactly: its scores are -inf, its weights 0 and the rescaling 1. Memory beyond a sequence's keys,
which may hold anything, is replaced by zeros before it is multiplied.

Every product contracts both last axes, and the softmax's sum is one more column of a product: XLA's CPU products
of that form give a row the same bits whatever the number of rows, its plain sums and other forms do not.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

#: Keys per step of the online softmax, where the block size divides it.
KEY_GROUP = 128
_FAR = 1 << 30
_LOW = -1e30  # a maximum before any key: finite, so that the first rescaling is exp(0) or exp(-1e30) and never NaN


def blocks_per_group(block_size: int) -> int:
    """How many KV blocks one step reads; block tables are padded to a multiple of it."""
    return max(1, KEY_GROUP // block_size)


def paged_attention(
    q: Array,
    k_memory: Array,
    v_memory: Array,
    layer: Array,
    tables: Array,
    visible: Array,
    scale: Array,
    window: Array,
) -> Array:
    """softmax(scale * q K^T) V over the keys each query may see.

    q: [W, Q, heads, D], W tiles of Q queries of one sequence. k_memory, v_memory: [L, blocks, kv_heads,
    block_size, D]. layer: scalar. tables: [W, N], N a multiple of `blocks_per_group`. visible: [W, Q] int32, keys
    that query sees when there is no window (its position + 1), 0 for padding. scale: scalar; window: scalar
    int32, how many of those, the last ones; 0 is all. Returns [W, Q, heads, D]; padding rows are zeros.
    """
    num_tiles, num_queries, num_heads, head_dim = q.shape
    num_layers, num_blocks, num_kv_heads, block_size, _ = k_memory.shape
    group = num_heads // num_kv_heads
    per_group = blocks_per_group(block_size)
    num_keys = per_group * block_size
    rows = num_queries * group
    # [W, kv_heads, Q * group, D]: the rows that share a KV head.
    q = q.reshape(num_tiles, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_tiles, num_kv_heads, rows, head_dim)
    keys = k_memory.reshape(num_layers * num_blocks * num_kv_heads, block_size, head_dim)
    values = v_memory.reshape(num_layers * num_blocks * num_kv_heads, block_size, head_dim)
    reach = jnp.where(window > 0, window, _FAR)
    row_visible = jnp.repeat(visible, group, axis=1)[:, None, :, None]  # [W, 1, rows, 1]
    tile_end = visible.max(axis=1)[:, None, None, None]  # [W, 1, 1, 1]
    first_key = jnp.where(visible > 0, jnp.maximum(visible - reach, 0), _FAR).min()
    last_group = (visible.max() + num_keys - 1) // num_keys
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]

    def step(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, weighted = state
        blocks = lax.dynamic_slice_in_dim(tables, index * per_group, per_group, axis=1)  # [W, per_group]
        where = (layer * num_blocks + blocks[:, None, :]) * num_kv_heads + heads  # [W, kv_heads, per_group]
        k = keys.at[where].get(mode="promise_in_bounds").reshape(num_tiles, num_kv_heads, num_keys, head_dim)
        v = values.at[where].get(mode="promise_in_bounds").reshape(num_tiles, num_kv_heads, num_keys, head_dim)
        key = index * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        v = jnp.where(key < tile_end, v.transpose(0, 1, 3, 2), 0.0)  # [W, kv_heads, D, keys]
        v = jnp.concatenate([v, jnp.ones((num_tiles, num_kv_heads, 1, num_keys), jnp.float32)], axis=2)
        scores = _batched(q, k) * scale  # [W, kv_heads, rows, keys]
        seen = (key < row_visible) & (key >= row_visible - reach)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        p = jnp.exp(scores - new_top)
        keep = jnp.exp(top - new_top)
        return new_top, weighted * keep + _batched(p, v)

    start = (
        jnp.full((num_tiles, num_kv_heads, rows, 1), _LOW, jnp.float32),
        jnp.zeros((num_tiles, num_kv_heads, rows, head_dim + 1), jnp.float32),
    )
    _, weighted = lax.fori_loop(first_key // num_keys, last_group, step, start)
    total = weighted[..., head_dim:]
    out = weighted[..., :head_dim] / jnp.where(total > 0, total, 1.0)
    out = out.reshape(num_tiles, num_kv_heads, num_queries, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_tiles, num_queries, num_heads, head_dim)


def _batched(x: Array, y: Array) -> Array:
    """x [W, K, M, D] times y [W, K, N, D]: the last axes contracted, in full float32."""
    return lax.dot_general(x, y, (((3,), (3,)), ((0, 1), (0, 1))), precision=lax.Precision.HIGHEST)
