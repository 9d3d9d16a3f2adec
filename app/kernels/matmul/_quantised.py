"""Weights stored in 8 bits, multiplied in float32: a quarter of the bytes where reading them is the limit.

A column's weights are taken in groups of 32 along the sum; each group stores a float32 scale and offset
and one byte per weight: w = scale * q + offset, one fused multiply-add. For up to sixteen rows that happens in
registers; more rows share a chunk that is expanded into a scratch of its own thread. Either way sums are added in the
order of `app.kernels.simd`, so bits are as independent of company as there, and equal to those of float32 storage of
the expanded values.

How weights come into this form, and which lose nothing by it: `_storing`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import PANEL, multiply_columns, multiply_panels
from app.kernels.simd import CHUNK, GROUP, expand_bytes, multiply_bytes_tile
from app.kernels.team import leave, take

#: Rows of the largest tile whose weights are expanded in registers. Beyond two such tiles a scratch is faster.
_MOST_IN_REGISTERS = 8

_one, _two, _three, _four, _five, _six, _seven, _eight = (multiply_bytes_tile(rows) for rows in range(1, 9))


class Quantised(NamedTuple):
    """levels: [..., P, K, 16] uint8; scales, offsets: [..., P, ceil(K / 32), 16] float32."""

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]


@compiled
def expand_panel(levels, scales, offsets, out):
    """out[k, c] = scales[k // 32, c] * levels[k, c] + offsets[k // 32, c]; [K, 16] float32 in place."""
    depth = levels.shape[0]
    for group in range(scales.shape[0]):
        first = group * GROUP
        expand_bytes(
            levels.ctypes.data + first * PANEL, scales.ctypes.data + group * 64, offsets.ctypes.data + group * 64,
            min(GROUP, depth - first), out.ctypes.data + first * 64,
        )  # fmt: skip


@compiled
def _multiply_few(x, x_row, num_rows, levels, scales, offsets, depth, out, out_row, accumulate):
    """One panel with up to `_MOST_IN_REGISTERS` rows; addresses and strides as in `multiply_bytes_tile`."""
    if num_rows == 1:
        _one(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 2:
        _two(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 3:
        _three(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 4:
        _four(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 5:
        _five(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 6:
        _six(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 7:
        _seven(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)
    elif num_rows == 8:
        _eight(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)


@compiled
def multiply_quantised_panels(x, w, first, end, out, accumulate):
    """As `app.kernels.matmul._cpu.multiply_panels` with the packed weights in 8 bits."""
    num_rows, depth = x.shape
    x_row, out_row, num_groups = x.strides[0] // 4, out.strides[0] // 4, w.scales.shape[1]
    scratch = np.empty((CHUNK, PANEL), np.float32)
    for panel in range(first, end):
        levels = w.levels.ctypes.data + panel * depth * PANEL
        scales = w.scales.ctypes.data + panel * num_groups * PANEL * 4
        offsets = w.offsets.ctypes.data + panel * num_groups * PANEL * 4
        to = out.ctypes.data + panel * PANEL * 4
        if num_rows <= 2 * _MOST_IN_REGISTERS:
            for row in range(0, num_rows, _MOST_IN_REGISTERS):
                _multiply_few(
                    x.ctypes.data + row * x_row * 4, x_row, min(_MOST_IN_REGISTERS, num_rows - row), levels, scales,
                    offsets, depth, to + row * out_row * 4, out_row, accumulate,
                )  # fmt: skip
            continue
        for start in range(0, max(depth, 1), CHUNK):
            count = min(CHUNK, depth - start)
            for k in range(start, start + count, GROUP):
                at = k // GROUP * PANEL * 4
                expand_bytes(
                    levels + k * PANEL, scales + at, offsets + at, min(GROUP, depth - k),
                    scratch.ctypes.data + (k - start) * PANEL * 4,
                )  # fmt: skip
            multiply_columns(
                x.ctypes.data + start * 4, scratch.ctypes.data, PANEL, 0, 1, count, to, accumulate or start > 0,
                num_rows, x_row, out_row,
            )  # fmt: skip


#: The packed weights of all layers: float32 panels [L, P, K, 16], or 8-bit ones with the same leading axis.
Stack = NDArray[np.float32] | Quantised


def layer_panels(stack, layer):
    """The packed weights of one layer, of either kind."""
    raise NotImplementedError("called from compiled code only")


@overload(layer_panels)
def _layer_panels(stack, layer):
    if isinstance(stack, types.Array):
        return lambda stack, layer: stack[layer]
    return lambda stack, layer: Quantised(stack.levels[layer], stack.scales[layer], stack.offsets[layer])


def num_panels_of(w):
    """Panels of one layer's packed weights."""
    raise NotImplementedError("called from compiled code only")


@overload(num_panels_of)
def _num_panels_of(w):
    if isinstance(w, types.Array):
        return lambda w: w.shape[0]
    return lambda w: w.levels.shape[0]


def multiply_any_panels(x, w, first, end, out, accumulate):
    """`multiply_panels` for either kind of weights."""
    raise NotImplementedError("called from compiled code only")


@overload(multiply_any_panels)
def _multiply_any_panels(x, w, first, end, out, accumulate):
    if isinstance(w, types.Array):
        return lambda x, w, first, end, out, accumulate: multiply_panels(x, w, first, end, out, accumulate)
    return lambda x, w, first, end, out, accumulate: multiply_quantised_panels(x, w, first, end, out, accumulate)


@compiled
def _column(head, token, out):
    panel, column = token // PANEL, token % PANEL
    for i in range(out.shape[0]):
        out[i] = head[0, panel, i, column]


@compiled
def _quantised_column(head, token, out):
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


def _embedding_row(head, token, out):
    """out[:] = column `token` of the tied head."""
    raise NotImplementedError("called from compiled code only")


@overload(_embedding_row)
def _embedding_row_of(head, token, out):
    if isinstance(head, types.Array):
        return lambda head, token, out: _column(head, token, out)
    return lambda head, token, out: _quantised_column(head, token, out)


@compiled
def embed(team, phase, token_ids, embedding, head, out):
    """out[t] = embedding row of token t. embedding: [V, H], or [0, H] to read the columns of `head` (a `Stack`).

    One phase.
    """
    num_tokens, done = token_ids.shape[0], 0
    t = take(team, phase)
    while t < num_tokens:
        if embedding.shape[0] > 0:
            for i in range(out.shape[1]):
                out[t, i] = embedding[token_ids[t], i]
        else:
            _embedding_row(head, token_ids[t], out[t])
        done += 1
        t = take(team, phase)
    return leave(team, phase, num_tokens, done)
