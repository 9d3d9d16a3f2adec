"""Shrink and expand in Pallas: one grid step per segment of tokens, rank rows read in chunks where they lie.

In: tokens, rank rows, a list of segments. Out: what `xla.add_deltas` computes, for one module of one layer. The
segment list is prefetched scalars, so block indices come from it and no row is gathered or copied. Written for the
TPU lowering (scalar prefetch, blocks of whole rows) and run elsewhere by the interpreter. No engine calls it yet:
nobody has measured it on a TPU. `RANK_CHUNK` rank rows are one block: row starts are multiples of it, as the engine
hands them out, and rows of an adapter's run beyond its rank are zero.

shrink: h[g, i] = A_rows @ x[i] for token i of segment g. expand: y[i] += B_rows.T @ h[g, i].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.kernels.sgmv.xla import RANK_CHUNK, SEGMENT_TOKENS, Segments


def lora_delta(
    x: Array, a: Array, b: Array, segments: Segments, starts: Array, ranks: Array, max_chunks: int, *, interpret: bool
) -> Array:
    """The delta of each token, zeros for tokens in no segment.

    x: [T, d_in]. a: [R, d_in]. b: [R, d_out], scale folded in. starts, ranks: [S], an adapter's first rank row and its
    rank. `max_chunks`: chunks of the largest rank, static. Returns [T, d_out] float32 (Hu et al. 2021).
    """
    first, end, adapter_slots = segments.lines.T  # [G] each
    token = first[:, None] + jnp.arange(SEGMENT_TOKENS, dtype=jnp.int32)  # [G, tile]
    is_real = jnp.arange(len(segments.lines), dtype=jnp.int32) < segments.num_segments
    mine = (token < end[:, None]) & is_real[:, None]
    tiles = jnp.where(mine[:, :, None], x[jnp.clip(token, 0, max(x.shape[0] - 1, 0))], 0.0)  # [G, tile, d_in]
    row_starts = starts[adapter_slots]
    chunks = jnp.where(is_real, lax.div(ranks[adapter_slots] + (RANK_CHUNK - 1), jnp.int32(RANK_CHUNK)), 0)
    shrunk = shrink(tiles, a, row_starts, chunks, max_chunks, interpret=interpret)
    deltas = expand(shrunk, b, row_starts, chunks, interpret=interpret)
    places = jnp.where(mine, token, x.shape[0])  # beyond the end: dropped
    out = jnp.zeros((x.shape[0], b.shape[1]), jnp.float32)
    return out.at[places.reshape(-1)].set(deltas.reshape(-1, b.shape[1]), mode="drop")


def shrink(tiles: Array, a: Array, row_starts: Array, num_chunks: Array, max_chunks: int, *, interpret: bool) -> Array:
    """tiles: [G, tile, d_in]; a: [R, d_in]; row_starts, num_chunks: [G]. Returns [G, max_chunks, tile, RANK_CHUNK].

    Chunks beyond a segment's own are zeros.
    """
    num_segments, tile, d_in = tiles.shape

    def kernel(_starts: Array, counts: Array, x: Array, rows: Array, out: Array) -> None:
        segment, chunk = pl.program_id(0), pl.program_id(1)
        product = _product(x[0], rows[...], 1)
        out[0, 0] = jnp.where(chunk < counts[segment], product, 0.0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_segments, max_chunks),
            in_specs=[
                pl.BlockSpec((1, tile, d_in), lambda g, c, starts, counts: (g, 0, 0)),  # noqa: ARG005
                pl.BlockSpec((RANK_CHUNK, d_in), _chunk_index),
            ],
            out_specs=pl.BlockSpec((1, 1, tile, RANK_CHUNK), lambda g, c, starts, counts: (g, c, 0, 0)),  # noqa: ARG005
        ),
        out_shape=jax.ShapeDtypeStruct((num_segments, max_chunks, tile, RANK_CHUNK), jnp.float32),
        interpret=interpret,
    )(row_starts, num_chunks, tiles, a)


def expand(shrunk: Array, b: Array, row_starts: Array, num_chunks: Array, *, interpret: bool) -> Array:
    """shrunk: [G, chunks, tile, RANK_CHUNK]; b: [R, d_out]. Returns [G, tile, d_out], chunks added in order."""
    num_segments, max_chunks, tile, _ = shrunk.shape
    d_out = b.shape[1]

    def kernel(_starts: Array, counts: Array, h: Array, rows: Array, out: Array) -> None:
        segment, chunk = pl.program_id(0), pl.program_id(1)

        @pl.when(chunk == 0)
        def _clear() -> None:
            out[...] = jnp.zeros_like(out)

        @pl.when(chunk < counts[segment])
        def _add() -> None:
            out[0] += _product(h[0, 0], rows[...], 0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_segments, max_chunks),
            in_specs=[
                pl.BlockSpec((1, 1, tile, RANK_CHUNK), lambda g, c, starts, counts: (g, c, 0, 0)),  # noqa: ARG005
                pl.BlockSpec((RANK_CHUNK, d_out), _chunk_index),
            ],
            out_specs=pl.BlockSpec((1, tile, d_out), lambda g, c, starts, counts: (g, 0, 0)),  # noqa: ARG005
        ),
        out_shape=jax.ShapeDtypeStruct((num_segments, tile, d_out), jnp.float32),
        interpret=interpret,
    )(row_starts, num_chunks, shrunk, b)


def _chunk_index(segment: Array, chunk: Array, starts: Array, counts: Array) -> tuple[Array, int]:
    """Block of rank rows for a chunk; the last one again beyond the segment's own, so nothing new is fetched."""
    last = jnp.maximum(counts[segment] - 1, 0)
    # Plain division: // would ask the lowering for the sign, and a device to ask.
    return lax.div(starts[segment], jnp.int32(RANK_CHUNK)) + jnp.minimum(chunk, last), 0


def _product(x: Array, y: Array, contract: int) -> Array:
    return lax.dot_general(
        x, y, (((1,), (contract,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
