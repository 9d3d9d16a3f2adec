"""LoRA deltas in JAX: segments of tokens of one adapter, rank rows in chunks, no shape that depends on either.

In: activations, the base product they gave, the tables of all layers and a list of segments. Out: the product
with the deltas added. Both loops (segments, rank chunks) have dynamic ends: adapters of any rank come and go
without recompiling, the work is proportional to the rows in use, and tokens of the base are not touched.
Every product has one fixed shape, so a token's bits depend on its own row and adapter only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

#: Tokens per segment and rank rows per chunk.
SEGMENT_TOKENS = 8
RANK_CHUNK = 8


class Segments(NamedTuple):
    """Up to `SEGMENT_TOKENS` consecutive tokens of one adapter each: [G] int32, the first `num_segments` are real.

    starts, lengths: token rows. row_starts: first rank row. num_chunks: rank rows / RANK_CHUNK.
    """

    num_segments: Array
    starts: Array
    lengths: Array
    row_starts: Array
    num_chunks: Array


def max_segments(num_tokens: int, num_sequences: int) -> int:
    """How many segments `num_tokens` tokens of `num_sequences` sequences can need."""
    return num_tokens // SEGMENT_TOKENS + min(num_tokens, num_sequences)


def segment_arrays(
    run_starts: NDArray[np.int32],
    run_adapter_slots: NDArray[np.int32],
    row_starts: NDArray[np.int32],
    ranks: NDArray[np.int32],
    out: NDArray[np.int32],
) -> int:
    """Fill out [4, G] (starts, lengths, row_starts, num_chunks); returns how many segments there are.

    run_starts: [runs + 1]; run_adapter_slots: [runs]; row_starts, ranks: [S]. Runs of rank 0 have no segments.
    """
    count = 0
    for run, adapter_slot in enumerate(run_adapter_slots.tolist()):
        rank = int(ranks[adapter_slot])
        if not rank:
            continue
        starts = np.arange(run_starts[run], run_starts[run + 1], SEGMENT_TOKENS)
        part = slice(count, count + len(starts))
        out[0, part] = starts
        out[1, part] = np.minimum(run_starts[run + 1] - starts, SEGMENT_TOKENS)
        out[2, part] = row_starts[adapter_slot]
        out[3, part] = -(-rank // RANK_CHUNK)
        count += len(starts)
    return count


def add_deltas(
    x: Array, y: Array, a: Array, b: Array, layer: Array, segments: Segments, out_sizes: Sequence[int]
) -> Array:
    """y[t] + B_rows.T @ (A_rows @ x[t]) for the rows of token t's adapter.

    x: [T, d_in]. y: [T, sum(out_sizes)], the products of M modules side by side. a: [L, R, M * d_in], each module's
    own A. b: [L, R, sum(out_sizes)], scale folded in. Rows of an adapter's run beyond a module's rank are zero.
    """
    if not a.shape[1]:
        return y  # no rank rows: adapters are switched off
    num_modules, d_in = len(out_sizes), x.shape[1]
    width = y.shape[1]
    tile = min(SEGMENT_TOKENS, x.shape[0])
    splits = np.cumsum([0, *out_sizes]).tolist()

    def segment(index: Array, y: Array) -> Array:
        wanted = segments.starts[index]
        start = jnp.minimum(wanted, x.shape[0] - tile)
        x_tile = lax.dynamic_slice(x, (start, 0), (tile, d_in))

        def chunk(number: Array, delta: Array) -> Array:
            row = segments.row_starts[index] + number * RANK_CHUNK
            a_rows = lax.dynamic_slice(a, (layer, row, 0), (1, RANK_CHUNK, num_modules * d_in))[0]
            b_rows = lax.dynamic_slice(b, (layer, row, 0), (1, RANK_CHUNK, width))[0]
            parts = []
            for module in range(num_modules):
                shrunk = _product(x_tile, a_rows[:, module * d_in : (module + 1) * d_in], 1)  # [tile, chunk]
                parts.append(_product(shrunk, b_rows[:, splits[module] : splits[module + 1]], 0))
            return delta + jnp.concatenate(parts, axis=1)

        delta = lax.fori_loop(0, segments.num_chunks[index], chunk, jnp.zeros((tile, width), jnp.float32))
        token = start + jnp.arange(tile, dtype=jnp.int32)[:, None]
        mine = (token >= wanted) & (token < wanted + segments.lengths[index])
        before = lax.dynamic_slice(y, (start, 0), (tile, width))
        return lax.dynamic_update_slice(y, jnp.where(mine, before + delta, before), (start, 0))

    return lax.fori_loop(0, segments.num_segments, segment, y)


def _product(x: Array, y: Array, contract: int) -> Array:
    return lax.dot_general(x, y, (((1,), (contract,)), ((), ())), precision=lax.Precision.HIGHEST)
