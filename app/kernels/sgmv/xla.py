"""LoRA deltas in JAX: segments of tokens of one adapter, rank rows in chunks, in shapes that depend on neither.

Both loops (segments, rank chunks) have dynamic ends: adapters of any rank come and go without recompiling, the work is
proportional to the rows in use, and tokens of the base are not touched.
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
    """Up to `SEGMENT_TOKENS` consecutive tokens of one adapter each, int32.

    lines: [G, 3] (first token, end token, adapter slot), of which num_segments are real. widest: the largest rank.
    """

    lines: Array
    num_segments: Array
    widest: Array


def max_segments(num_tokens: int, num_sequences: int) -> int:
    """The most segments that `num_tokens` tokens of `num_sequences` sequences can need."""
    return num_tokens // SEGMENT_TOKENS + min(num_tokens, num_sequences)


def segment_lines(run_starts: NDArray[np.int32], run_adapter_slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """[G, 3], `Segments.lines`, of runs of tokens with one adapter; the base (slot 0) has none.

    run_starts: [runs + 1]; run_adapter_slots: [runs].
    """
    lines = [
        (first, min(first + SEGMENT_TOKENS, end), adapter_slot)
        for start, end, adapter_slot in zip(
            run_starts[:-1].tolist(), run_starts[1:].tolist(), run_adapter_slots.tolist(), strict=True
        )
        if adapter_slot
        for first in range(start, end, SEGMENT_TOKENS)
    ]
    return np.array(lines, np.int32).reshape(-1, 3)


def add_deltas(
    x: Array, y: Array, a: Sequence[Array], b: Sequence[Array], layer: Array, segments: Segments, starts: Array,
    ranks: Array,
) -> Array:  # fmt: skip
    """y[t] + B_rows.T @ (A_rows @ x[t]) for the rows of token t's adapter (Hu et al. 2021).

    x: [T, d_in]. y: [T, sum of W], the products of M modules side by side. a: per module [L, R, d_in], b: per module
    [L, R, W], scale folded in; rows of an adapter's run beyond a module's rank, up to a whole chunk of the largest, are
    zero. starts: [S], an adapter's first rank row. ranks: [L, S, M].
    """
    if not a[0].shape[1]:
        return y  # no rank rows: adapters are switched off
    d_in, width = x.shape[1], y.shape[1]
    tile = min(SEGMENT_TOKENS, x.shape[0])

    def segment(index: Array, y: Array) -> Array:
        first, end, adapter_slot = segments.lines[index]
        start = jnp.minimum(first, x.shape[0] - tile)
        x_tile = lax.dynamic_slice(x, (start, 0), (tile, d_in))

        def chunk(number: Array, delta: Array) -> Array:
            row = starts[adapter_slot] + number * RANK_CHUNK
            parts = []
            for a_rows, b_rows in zip(a, b, strict=True):
                mine = lax.dynamic_slice(a_rows, (layer, row, 0), (1, RANK_CHUNK, d_in))[0]
                shrunk = _product(x_tile, mine, 1)  # [tile, chunk]
                mine = lax.dynamic_slice(b_rows, (layer, row, 0), (1, RANK_CHUNK, b_rows.shape[2]))[0]
                parts.append(_product(shrunk, mine, 0))
            return delta + jnp.concatenate(parts, axis=1)

        num_chunks = (ranks[layer, adapter_slot].max() + RANK_CHUNK - 1) // RANK_CHUNK
        delta = lax.fori_loop(0, num_chunks, chunk, jnp.zeros((tile, width), jnp.float32))
        token = start + jnp.arange(tile, dtype=jnp.int32)[:, None]
        before = lax.dynamic_slice(y, (start, 0), (tile, width))
        after = jnp.where((token >= first) & (token < end), before + delta, before)
        return lax.dynamic_update_slice(y, after, (start, 0))

    return lax.fori_loop(0, segments.num_segments, segment, y)


def _product(x: Array, y: Array, contract: int) -> Array:
    return lax.dot_general(x, y, (((1,), (contract,)), ((), ())), precision=lax.Precision.HIGHEST)
