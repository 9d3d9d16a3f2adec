"""LoRA deltas in Pallas: one grid step per segment of tokens and chunk of rank rows, which are read in place.

The segment list is prefetched scalars, so block indices come from it and no rank row is gathered or copied. The grid is
as long as the step has segments and its largest adapter has chunks: adapters of any rank come and go without
recompiling. Written for the TPU lowering (scalar prefetch, blocks of whole rows); elsewhere the interpreter runs it; no
TPU has run it yet. `RANK_CHUNK` rank rows are one block: the engine's row starts are multiples of it, and rows of an
adapter's run beyond its rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.kernels.sgmv.xla import RANK_CHUNK, SEGMENT_TOKENS, Segments


def add_deltas(
    x: Array, y: Array, a: Sequence[Array], b: Sequence[Array], layer: Array, segments: Segments, starts: Array,
    ranks: Array, *, interpret: bool,
) -> Array:  # fmt: skip
    """See `app.kernels.sgmv.xla.add_deltas`."""
    num_rows = a[0].shape[1]
    if not num_rows:
        return y  # no rank rows: adapters are switched off
    first, end, adapter_slots = segments.lines.T  # [G] each
    token = first[:, None] + jnp.arange(SEGMENT_TOKENS, dtype=jnp.int32)  # [G, tile]
    is_real = jnp.arange(len(segments.lines), dtype=jnp.int32) < segments.num_segments
    mine = (token < end[:, None]) & is_real[:, None]
    tiles = jnp.where(mine[:, :, None], x[jnp.minimum(token, len(x) - 1)], 0.0)  # [G, tile, d_in]
    # Rows of all layers are one table, so the layer is part of where a run starts.
    row_starts = layer * num_rows + starts[adapter_slots]
    chunks = (ranks[layer, adapter_slots] + RANK_CHUNK - 1) // RANK_CHUNK  # [G, M]
    # At least one chunk: it clears the output of an adapter without rank rows.
    grid = (segments.num_segments, jnp.maximum((segments.widest + RANK_CHUNK - 1) // RANK_CHUNK, 1))
    deltas = [
        _deltas(
            tiles, rows_a.reshape(-1, rows_a.shape[2]), rows_b.reshape(-1, rows_b.shape[2]), row_starts, chunks[:, n],
            grid, interpret=interpret,
        )
        for n, (rows_a, rows_b) in enumerate(zip(a, b, strict=True))
    ]  # fmt: skip
    places = jnp.where(mine, token, len(x)).reshape(-1)  # beyond the end: dropped
    return y.at[places].add(jnp.concatenate(deltas, axis=2).reshape(len(places), -1), mode="drop")


def _deltas(
    tiles: Array, a: Array, b: Array, row_starts: Array, num_chunks: Array, grid: tuple[Array, Array], *,
    interpret: bool,
) -> Array:  # fmt: skip
    """[G, tile, d_out]: the chunks' B_rows.T @ (A_rows @ x), added in order; nothing is written beyond the grid.

    tiles: [G, tile, d_in]. a: [R, d_in]. b: [R, d_out]. row_starts, num_chunks: [G].
    """
    num_segments, tile, d_in = tiles.shape
    d_out = b.shape[1]
    row_starts = jnp.where(num_chunks > 0, row_starts, 0)  # a run of no rows may begin behind the last one

    def kernel(_starts: Array, counts: Array, x: Array, a_rows: Array, b_rows: Array, out: Array) -> None:
        segment, chunk = pl.program_id(0), pl.program_id(1)

        @pl.when(chunk == 0)
        def _clear() -> None:
            out[...] = jnp.zeros_like(out)

        @pl.when(chunk < counts[segment])
        def _add() -> None:
            out[0] += _product(_product(x[0], a_rows[...], 1), b_rows[...], 0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                pl.BlockSpec((1, tile, d_in), lambda g, c, starts, counts: (g, 0, 0)),  # noqa: ARG005
                pl.BlockSpec((RANK_CHUNK, d_in), _chunk_index),
                pl.BlockSpec((RANK_CHUNK, d_out), _chunk_index),
            ],
            out_specs=pl.BlockSpec((1, tile, d_out), lambda g, c, starts, counts: (g, 0, 0)),  # noqa: ARG005
        ),
        out_shape=jax.ShapeDtypeStruct((num_segments, tile, d_out), jnp.float32),
        interpret=interpret,
    )(row_starts, num_chunks, tiles, a, b)


def _chunk_index(segment: Array, chunk: Array, starts: Array, counts: Array) -> tuple[Array, int]:
    """Block of rank rows of a chunk; beyond the segment's own chunks the last one again, so that nothing new is
    fetched.
    """
    last = jnp.maximum(counts[segment] - 1, 0)
    # Plain division: // would make the lowering look up the sign on a device.
    return lax.div(starts[segment], jnp.int32(RANK_CHUNK)) + jnp.minimum(chunk, last), 0


def _product(x: Array, y: Array, contract: int) -> Array:
    return lax.dot_general(
        x, y, (((1,), (contract,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
