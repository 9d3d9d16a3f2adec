"""LoRA deltas on the CPU inside XLA programs: the tiles of `_cpu` over the tables of `_jax`, as a custom call.

In: what `_jax.add_deltas` takes, except that each block of eight rank rows of a table `a` holds, per module, a panel
[d_in, 8] (`packed_a`). Out: the products with the deltas added, in the memory of those given. An adapter costs its
own rank, in two phases: shrinks by segment and module, expands by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import PANEL, multiply_columns
from app.kernels.sgmv._cpu import RANK_PANEL, _shrink_rows
from app.kernels.sgmv._jax import Segments
from app.kernels.team import leave, take
from app.kernels.xla_call import args_of, buffer, floats, ints, leave_record, register, size, task, team_of

#: Panels of rank rows of one piece of a shrink, and columns of one piece of an expand.
_SHRINK_PANELS = 2
_EXPAND_COLUMNS = 4 * PANEL


def packed_a(a: NDArray[np.float32]) -> NDArray[np.float32]:
    """a: [..., R, d_in], R a multiple of 8 -> the same shape, each block of eight rows transposed in its memory."""
    *outer, num_rows, depth = a.shape
    blocks = a.reshape(*outer, num_rows // RANK_PANEL, RANK_PANEL, depth)
    return np.ascontiguousarray(blocks.swapaxes(-1, -2)).reshape(a.shape)


def add_deltas(
    x: Array, y: Array, a: Array, b: Array, layer: Array, segments: Segments, widest: Array, out_sizes: Sequence[int]
) -> Array:
    """y[t] + B_rows.T @ (A_rows @ x[t]) for the rows of token t's adapter.

    x: [T, d_in]. y: [T, >= sum(out_sizes)], the products of M modules side by side. a: [L, M, R, d_in] of `packed_a`.
    b: [L, R, sum(out_sizes)], scale folded in. widest: the most chunks of rank rows in any segment.
    """
    num_rows = b.shape[1]
    if not num_rows:
        return y  # no rank rows: adapters are switched off
    scalars = jnp.stack([layer, segments.num_segments, widest])
    shrunk = jax.ShapeDtypeStruct((x.shape[0], len(out_sizes), num_rows), jnp.float32)
    call = jax.ffi.ffi_call(
        _target()[0], (jax.ShapeDtypeStruct(y.shape, jnp.float32), shrunk), input_output_aliases={1: 0}
    )
    splits = np.cumsum([0, *out_sizes]).astype(np.int32)
    out, _ = call(scalars, y, x, a, b, *segments[1:], splits)
    added: Array = out
    return added


@cache
def _target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _add_deltas(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_add_deltas", register("polylora_add_deltas", run)


@compiled
def _add_deltas(team, args):
    """scalars: layer, segments, most chunks. Buffers: y, x, a, b, starts, lengths, row starts, chunks, splits; results:
    y and scratch [T, M, R]."""
    layer, num_segments, widest = args[0], args[1], args[2]
    y_row, depth = size(args, 0, 1), size(args, 1, 1)
    num_modules, num_rows, width = size(args, 2, 1), size(args, 3, 1), size(args, 3, 2)
    x = buffer(args, 1)
    a = buffer(args, 2) + layer * num_modules * num_rows * depth * 4
    b = buffer(args, 3) + layer * num_rows * width * 4
    limit = size(args, 4, 0)
    starts, lengths = ints(buffer(args, 4), (limit,)), ints(buffer(args, 5), (limit,))
    row_starts, num_chunks = ints(buffer(args, 6), (limit,)), ints(buffer(args, 7), (limit,))
    splits, h = ints(buffer(args, 8), (size(args, 8, 0),)), buffer(args, 10)
    h_row = num_modules * num_rows

    parts = (widest + _SHRINK_PANELS - 1) // _SHRINK_PANELS
    num_pieces, done = num_segments * num_modules * parts, 0
    index = take(team, 0)
    while index < num_pieces:
        job = index // parts
        first = (index - job * parts) * _SHRINK_PANELS
        segment = job // num_modules
        module = job - segment * num_modules
        count = min(num_chunks[segment] - first, _SHRINK_PANELS)
        if count > 0:
            rank = first * RANK_PANEL
            _shrink_rows(
                x + starts[segment] * depth * 4, depth, lengths[segment],
                a + (module * num_rows + row_starts[segment] + rank) * depth * 4, count, depth,
                h + (starts[segment] * h_row + module * num_rows + rank) * 4, h_row,
            )  # fmt: skip
        done += 1
        index = take(team, 0)
    leave(team, 0, num_pieces, done)

    # Pieces of columns: at most that many per module, some of them empty.
    parts = (width + _EXPAND_COLUMNS - 1) // _EXPAND_COLUMNS
    num_pieces, done = num_modules * parts if num_segments > 0 else 0, 0
    index = take(team, 1)
    while index < num_pieces:
        module = index // parts
        first = splits[module] + (index - module * parts) * _EXPAND_COLUMNS
        end = min(splits[module + 1], first + _EXPAND_COLUMNS)
        if first < end:
            for segment in range(num_segments):
                _expand(
                    h + (starts[segment] * h_row + module * num_rows) * 4, h_row, lengths[segment],
                    num_chunks[segment] * RANK_PANEL, b + row_starts[segment] * width * 4, width, first, end,
                    buffer(args, 9) + starts[segment] * y_row * 4, y_row,
                )  # fmt: skip
        done += 1
        index = take(team, 1)
    leave(team, 1, num_pieces, done)


@compiled
def _expand(h, h_row, num_rows, rank, b, width, first, end, y, y_row):
    """y[i, first:end] += h[i, :rank] @ b[:rank, first:end]; addresses and element strides."""
    num_panels = (end - first) // PANEL
    multiply_columns(h, b + first * 4, width, PANEL, num_panels, rank, y + first * 4, True, num_rows, h_row, y_row)
    start = first + num_panels * PANEL
    for i in range(num_rows):
        row = floats(h + i * h_row * 4, (rank,))
        out = floats(y + i * y_row * 4, (end,))
        for column in range(start, end):
            total = np.float32(0.0)
            for k in range(rank):
                total += row[k] * floats(b + k * width * 4, (end,))[column]
            out[column] += total
