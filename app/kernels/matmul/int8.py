"""Products with weights stored in 8 bits, in float32 arithmetic: a quarter of the bytes where reading them is the
limit.

A column's weights are taken in groups of 32 along the sum; each group stores a float32 scale and offset and one byte
per weight: w = scale * q + offset, one fused multiply-add. For one tile of rows the weights are expanded in registers;
with more, the first tile leaves the expanded weights, a chunk at a time, to the others. Either way sums are added in
the order of `app.kernels.machine.simd`: batch-invariant, with the bits of float32 storage of the expanded values.

`app.kernels.matmul.pack_weights` converts weights and says which lose nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from app.kernels.bf16_matmul.cpu import Bf16Panels, bf16_panels_per_piece, is_bf16, multiply_bf16_panels
from app.kernels.int8_matmul.cpu import DotPanels, is_dot, level_of, multiply_dot_panels
from app.kernels.machine.jit import jit
from app.kernels.machine.row_groups import round_rows
from app.kernels.machine.simd import CHUNK, GROUP, expand_bytes, multiply_and_expand_tile, multiply_bytes_tile
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece
from app.kernels.matmul.cpu import (
    MOST_ROWS,
    NO_FETCH,
    PANEL,
    count_steps,
    fetch_rate,
    multiply_columns,
    multiply_panels,
    panels_per_piece,
    tile_rows,
)

_plain_tile = multiply_bytes_tile(MOST_ROWS, fetches=False)
_fetching_tile = multiply_bytes_tile(MOST_ROWS, fetches=True)
_expanding_tile = multiply_and_expand_tile(MOST_ROWS)


class Int8Panels(NamedTuple):
    """8-bit weights. levels: [..., P, K, 16] uint8; scales, offsets: [..., P, ceil(K / 32), 16] float32."""

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]


@jit
def expand_panel(levels, scales, offsets, out):
    """out[k, c] = scales[k // 32, c] * levels[k, c] + offsets[k // 32, c]; [K, 16] float32 in place."""
    _expand(levels.ctypes.data, scales.ctypes.data, offsets.ctypes.data, levels.shape[0], out.ctypes.data)


@jit
def _expand(levels, scales, offsets, depth, out):
    """`expand_panel` of addresses."""
    for first in range(0, depth, GROUP):
        at = first // GROUP * PANEL * 4
        expand_bytes(
            levels + first * PANEL, scales + at, offsets + at, min(GROUP, depth - first), out + first * PANEL * 4
        )


@jit
def _plain(rows, x, x_row, levels, scales, offsets, depth, out, out_row, accumulate):
    """One panel with up to `MOST_ROWS` rows."""
    _plain_tile(rows, x, x_row, levels, scales, offsets, depth, out, out_row, accumulate, 0, 0, 0)


@jit
def _fetching(rows, x, x_row, levels, scales, offsets, depth, out, out_row, accumulate, blocks, step, rate):
    """`_plain` with prefetching. A separate function: `_plain` is faster without this code in it."""
    _fetching_tile(rows, x, x_row, levels, scales, offsets, depth, out, out_row, accumulate, blocks, step, rate)


@jit
def _expanding(rows, x, x_row, levels, scales, offsets, depth, out, out_row, accumulate, expanded):
    """A chunk of `_plain` that leaves its weights in `expanded` [depth, 16]."""
    _expanding_tile(rows, x, x_row, levels, scales, offsets, depth, out, out_row, accumulate, expanded)


@jit
def multiply_int8_panels(x, w, first, end, out, accumulate, fetch):
    """`app.kernels.matmul.cpu.multiply_panels` with the packed weights in 8 bits."""
    num_rows, depth = x.shape
    x_row, out_row, num_groups = x.strides[0] // 4, out.strides[0] // 4, w.scales.shape[1]
    rows = tile_rows(num_rows)
    left, x_left = num_rows - rows, x.ctypes.data + rows * x_row * 4
    num_steps = count_steps(left, end - first, depth) if left > 0 else (end - first) * depth
    blocks, rate = fetch.blocks, fetch_rate(fetch, num_steps)
    scratch, step = np.empty((CHUNK, PANEL), np.float32), 0
    for panel in range(first, end):
        levels = w.levels.ctypes.data + panel * depth * PANEL
        scales = w.scales.ctypes.data + panel * num_groups * PANEL * 4
        offsets = w.offsets.ctypes.data + panel * num_groups * PANEL * 4
        to = out.ctypes.data + panel * PANEL * 4
        if left == 0 and rate == 0:
            _plain(rows, x.ctypes.data, x_row, levels, scales, offsets, depth, to, out_row, accumulate)
        elif left == 0:
            _fetching(
                rows, x.ctypes.data, x_row, levels, scales, offsets, depth, to, out_row, accumulate, blocks, step, rate
            )
            step += depth
        else:
            for start in range(0, max(depth, 1), CHUNK):
                count, grid, adds = min(CHUNK, depth - start), start // GROUP * PANEL * 4, accumulate or start > 0
                _expanding(
                    rows, x.ctypes.data + start * 4, x_row, levels + start * PANEL, scales + grid, offsets + grid,
                    count, to, out_row, adds, scratch.ctypes.data,
                )  # fmt: skip
                multiply_columns(
                    x_left + start * 4, scratch.ctypes.data, PANEL, 0, 1, count, to + rows * out_row * 4, adds, left,
                    x_row, out_row, 0, False, blocks, step, rate,
                )  # fmt: skip
                step += count_steps(left, 1, count)


#: The packed weights of all layers: float32 panels [L, P, K, 16], or 8-bit ones with the same leading axis, for
#: products in float32 or in integers, or such for products in bfloat16.
Stack = NDArray[np.float32] | Int8Panels | DotPanels | Bf16Panels


def layer_panels(stack, layer):
    """The packed weights of one layer, of either kind."""
    raise NotImplementedError("called from compiled code only")


@overload(layer_panels)
def _layer_panels(stack, layer):
    if isinstance(stack, types.Array):
        return lambda stack, layer: stack[layer]
    if is_bf16(stack):
        pairs = stack.instance_class
        return lambda stack, layer: pairs(stack.pairs[layer], stack.rows)
    if is_dot(stack):
        panels = stack.instance_class
        return lambda stack, layer: panels(stack.levels[layer], stack.scales[layer], stack.offsets[layer], stack.rows)
    return lambda stack, layer: Int8Panels(stack.levels[layer], stack.scales[layer], stack.offsets[layer])


def num_panels_of(w):
    """Panels of one layer's packed weights."""
    raise NotImplementedError("called from compiled code only")


@overload(num_panels_of)
def _num_panels_of(w):
    if isinstance(w, types.Array):
        return lambda w: w.shape[0]
    if is_bf16(w):
        return lambda w: w.pairs.shape[0]
    return lambda w: w.levels.shape[0]


def piece_size(w, num_rows, num_panels):
    """Panels that one thread takes at a time of a product of num_rows rows with num_panels panels of w."""
    raise NotImplementedError("called from compiled code only")


@overload(piece_size)
def _piece_size(w, num_rows, num_panels):
    if is_bf16(w):
        return lambda w, num_rows, num_panels: bf16_panels_per_piece(num_panels)  # noqa: ARG005
    return lambda w, num_rows, num_panels: panels_per_piece(num_rows, num_panels)  # noqa: ARG005


def prepare_rows(team, phase, x, w):
    """Round x [T, K] for products in integers or bfloat16 with w, of which only one may be prepared at a time: one
    phase. For other weights do nothing. w: of one layer or of all.
    """
    raise NotImplementedError("called from compiled code only")


@overload(prepare_rows)
def _prepare_rows(team, phase, x, w):
    if is_dot(w) or is_bf16(w):
        return lambda team, phase, x, w: round_rows(team, phase, x, w.rows)
    return lambda team, phase, x, w: phase  # noqa: ARG005


def multiply_any_panels(x, w, first, end, out, accumulate, fetch):
    """`multiply_panels` for any kind of weights, after `prepare_rows` of x."""
    raise NotImplementedError("called from compiled code only")


@overload(multiply_any_panels)
def _multiply_any_panels(x, w, first, end, out, accumulate, fetch):
    if isinstance(w, types.Array):
        return lambda x, w, first, end, out, accumulate, fetch: multiply_panels(
            x, w, first, end, out, accumulate, fetch
        )
    if is_dot(w):
        return lambda x, w, first, end, out, accumulate, fetch: multiply_dot_panels(  # noqa: ARG005
            w.rows, 0, x.shape[0], w, first, end, out, accumulate
        )
    if is_bf16(w):
        return lambda x, w, first, end, out, accumulate, fetch: multiply_bf16_panels(  # noqa: ARG005
            w, 0, x.shape[0], first, end, out, accumulate
        )
    return lambda x, w, first, end, out, accumulate, fetch: multiply_int8_panels(
        x, w, first, end, out, accumulate, fetch
    )


def prefetches(w):
    """Whether `multiply_any_panels` prefetches what `fetch` lists. Products in integers or bfloat16 read their own
    weights as fast as memory delivers them.
    """
    raise NotImplementedError("called from compiled code only")


@overload(prefetches)
def _prefetches(w):
    is_float32 = not is_dot(w) and not is_bf16(w)
    return lambda w: is_float32  # noqa: ARG005


def multiply_some_rows(x, low, high, w, first, end, out, accumulate):
    """`multiply_any_panels` for rows low to high of x, which is prepared as a whole. out: [high - low, ...]."""
    raise NotImplementedError("called from compiled code only")


@overload(multiply_some_rows)
def _multiply_some_rows(x, low, high, w, first, end, out, accumulate):
    if is_dot(w):
        return lambda x, low, high, w, first, end, out, accumulate: multiply_dot_panels(  # noqa: ARG005
            w.rows, low, x.shape[0], w, first, end, out, accumulate
        )
    if is_bf16(w):
        return lambda x, low, high, w, first, end, out, accumulate: multiply_bf16_panels(  # noqa: ARG005
            w, low, x.shape[0], first, end, out, accumulate
        )
    return lambda x, low, high, w, first, end, out, accumulate: multiply_any_panels(
        x[low:high], w, first, end, out, accumulate, NO_FETCH
    )


@jit
def multiply(team, phase, x, w, out):
    """out = x @ w for any kind of weights of one layer; see `app.kernels.matmul.cpu.matmul`. At most two phases."""
    phase = prepare_rows(team, phase, x, w)
    num_panels, done = num_panels_of(w), 0
    size = piece_size(w, x.shape[0], num_panels)
    num_pieces = count_pieces(num_panels, size)
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, size)
        multiply_any_panels(x, w, first, end, out, False, NO_FETCH)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def _column(head, token, out):
    panel, column = token // PANEL, token % PANEL
    for i in range(out.shape[0]):
        out[i] = head[0, panel, i, column]


@jit
def _int8_column(head, token, out):
    panel, column = token // PANEL, token % PANEL
    row = np.empty((GROUP, PANEL), np.float32)
    depth = out.shape[0]
    for group in range(head.scales.shape[2]):
        first = group * GROUP
        count = min(GROUP, depth - first)
        expand_bytes(
            head.levels[0, panel].ctypes.data + first * PANEL, head.scales[0, panel, group].ctypes.data,
            head.offsets[0, panel, group].ctypes.data, count, row.ctypes.data,
        )  # fmt: skip
        for i in range(count):
            out[first + i] = row[i, column]


@jit
def _dot_column(head, token, out):
    panel, column = token // PANEL, token % PANEL
    levels, row = np.zeros((GROUP, PANEL), np.uint8), np.empty((GROUP, PANEL), np.float32)
    layer, depth = layer_panels(head, 0), out.shape[0]
    for group in range(head.scales.shape[2]):
        count = min(GROUP, depth - group * GROUP)
        for i in range(count):
            levels[i, column] = level_of(layer, panel, group, i, column)
        expand_bytes(
            levels.ctypes.data, head.scales[0, panel, group].ctypes.data, head.offsets[0, panel, group].ctypes.data,
            count, row.ctypes.data,
        )  # fmt: skip
        for i in range(count):
            out[group * GROUP + i] = row[i, column]


@jit
def _bf16_column(head, token, out):
    panel, column = token // PANEL, token % PANEL
    for i in range(out.shape[0]):
        bits = np.uint32(head.pairs[0, panel, i // GROUP, i % GROUP // 2, column, i % 2])
        out[i] = np.uint32(bits << np.uint32(16)).view(np.float32)


def _embedding_row(head, token, out):
    """out[:] = column `token` of the tied head."""
    raise NotImplementedError("called from compiled code only")


@overload(_embedding_row)
def _embedding_row_of(head, token, out):
    if isinstance(head, types.Array):
        return lambda head, token, out: _column(head, token, out)
    if is_bf16(head):
        return lambda head, token, out: _bf16_column(head, token, out)
    if is_dot(head):
        return lambda head, token, out: _dot_column(head, token, out)
    return lambda head, token, out: _int8_column(head, token, out)


@jit
def embed(team, phase, token_ids, embedding, head, out):
    """out[t] = embedding row of token t. embedding: [V, H], or [0, H] to read the columns of `head` (a `Stack`).

    A token that only an adapter has gets any row, which the adapter's own replaces. One phase.
    """
    num_tokens, done = token_ids.shape[0], 0
    num_rows = embedding.shape[0] if embedding.shape[0] > 0 else num_panels_of(layer_panels(head, 0)) * PANEL
    t = claim_piece(team, phase)
    while t < num_tokens:
        if embedding.shape[0] > 0:
            for i in range(out.shape[1]):
                out[t, i] = embedding[min(token_ids[t], num_rows - 1), i]
        else:
            _embedding_row(head, min(token_ids[t], num_rows - 1), out[t])
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)
