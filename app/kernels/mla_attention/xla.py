"""Latent attention in JAX, directly on latents: products by head with their deltas, and attention.

A token's latent and the rotated part of its key are written once; the value of a key is its latent, so memory is read
once. `kv_b_proj` is applied on both sides of attention, head by head; so are its LoRA deltas: with B.T A split by heads
into rows of keys and of values, K_h.T q gains A.T (B_keys,h q), and V_h c gains B_values,h.T (A c).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from app.kernels.paged_attention.xla import Queries, Tiles, attend, store
from app.kernels.sgmv.xla import RANK_CHUNK, SEGMENT_TOKENS, Segments


def multiply_heads(x: Array, weights: Array, first: Array) -> Array:
    """[T, N, W]: head h of x [T, N, D] times weights[first + h]; weights: [M, W, D]."""
    mine = lax.dynamic_slice_in_dim(weights, first, x.shape[1])
    return jnp.einsum("tnd,nwd->tnw", x, mine, precision=lax.Precision.HIGHEST)


def store_and_attend(
    absorbed: Array, rotated: Array, rows: Array, latents: Array, queries: Queries, tiles: Tiles, layer: Array,
    scale: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Write rows to their places; then every head's sum of latents over the keys that each query sees.

    absorbed: [T, N, R], queries taken to latents; rotated: [T, N, E]; rows: [T, R + E], the step's latents and rotated
    keys. latents: [L, blocks, 1, block_size, R + E]. Returns [T, N, R] (padding rows are arbitrary), and the memory.
    """
    latents = store(latents, rows[:, None], layer, queries.kv_slots)
    q = jnp.concatenate([absorbed, rotated], axis=2)
    no_window, no_sinks = jnp.int32(0), jnp.zeros(0, jnp.float32)
    found = attend(q[tiles.rows], latents, absorbed.shape[2], layer, tiles, scale, no_window, no_sinks)
    return found.reshape(-1, *found.shape[2:])[tiles.places], latents


def add_deltas(
    x: Array, y: Array, a: Array, b: Array, layer: Array, segments: Segments, starts: Array, ranks: Array,
    key_size: int, *, of_keys: bool,
) -> Array:  # fmt: skip
    """y [T, N, W] with the deltas of `kv_b_proj` of x [T, N, D]: of keys (D = P, W = R) or of values (D = R, W = V).

    a: [L, ranks, R]; b: [L, ranks, N * (P + V)], scale folded in, P being `key_size`. starts, ranks [L, S, 1] and the
    loops as in `app.kernels.sgmv.xla.add_deltas`.
    """
    if not a.shape[1]:
        return y  # no rank rows: adapters are switched off
    tile, num_heads = min(SEGMENT_TOKENS, len(x)), x.shape[1]

    def segment(index: Array, y: Array) -> Array:
        first, end, adapter_slot = segments.lines[index]
        start = jnp.minimum(first, len(x) - tile)
        x_tile = lax.dynamic_slice_in_dim(x, start, tile)

        def chunk(number: Array, delta: Array) -> Array:
            row = starts[adapter_slot] + number * RANK_CHUNK
            own_a, own_b = (
                lax.dynamic_slice(table, (layer, row, 0), (1, RANK_CHUNK, table.shape[2]))[0] for table in (a, b)
            )
            by_head = own_b.reshape(RANK_CHUNK, num_heads, -1)  # [r, N, P + V]
            if of_keys:
                return delta + _sums("tnr,rw->tnw", _sums("tnd,rnd->tnr", x_tile, by_head[:, :, :key_size]), own_a)
            return delta + _sums("tnr,rnw->tnw", _sums("tnd,rd->tnr", x_tile, own_a), by_head[:, :, key_size:])

        num_chunks = (ranks[layer, adapter_slot, 0] + RANK_CHUNK - 1) // RANK_CHUNK
        before = lax.dynamic_slice_in_dim(y, start, tile)
        after = lax.fori_loop(0, num_chunks, chunk, before)
        token = start + jnp.arange(tile, dtype=jnp.int32)[:, None, None]
        mine = (token >= first) & (token < end)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(mine, after, before), start, 0)

    return lax.fori_loop(0, segments.num_segments, segment, y)


def _sums(terms: str, x: Array, y: Array) -> Array:
    return jnp.einsum(terms, x, y, precision=lax.Precision.HIGHEST)
