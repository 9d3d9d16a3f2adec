"""Weights stored in 8 bits, multiplied in float32: a quarter of the bytes where reading them is the limit.

A column's weights are taken in groups of 32 along the sum; each group stores a float32 scale and offset
and one byte per weight: w = scale * q + offset, one fused multiply-add. A panel is expanded into a
scratch of its own thread and multiplied by the same tiles as float32 weights, so bits are as independent of
company as there (`app.kernels.simd`), and equal to those of float32 storage of the expanded values.

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
from app.kernels.simd import CHUNK, add_floats, expand_bytes, multiply_bytes_tile
from app.kernels.team import leave, take

#: Weights that share a scale and an offset.
GROUP = 32

_one_by_16 = multiply_bytes_tile(1, 1)
_one_by_32 = multiply_bytes_tile(1, 2)
_two_by_16 = multiply_bytes_tile(2, 1)
_two_by_32 = multiply_bytes_tile(2, 2)


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
def _multiply_few(x, x_row, num_rows, levels, scales, offsets, first, last, out, out_row, accumulate):
    """One or two rows: weights are expanded in registers, each byte being used once or twice only."""
    depth, num_groups = levels.shape[1], scales.shape[1]
    partial = np.empty((num_rows, 2 * PANEL), np.float32)
    panel = first
    while panel < last:
        count = 2 if panel + 2 <= last else 1
        for start in range(0, max(depth, 1), CHUNK):
            partial[:] = np.float32(0.0)
            for group in range(start // GROUP, min(start + CHUNK, depth + GROUP - 1) // GROUP):
                k = group * GROUP
                at = levels.ctypes.data + (panel * depth + k) * PANEL
                scale = scales.ctypes.data + (panel * num_groups + group) * 64
                offset = offsets.ctypes.data + (panel * num_groups + group) * 64
                steps, xk, to = min(GROUP, depth - k), x + k * 4, partial.ctypes.data
                if num_rows == 1 and count == 2:
                    _one_by_32(xk, x_row, at, depth * PANEL, scale, offset, num_groups * PANEL, steps, to, 32)
                elif num_rows == 1:
                    _one_by_16(xk, x_row, at, 0, scale, offset, 0, steps, to, 32)
                elif count == 2:
                    _two_by_32(xk, x_row, at, depth * PANEL, scale, offset, num_groups * PANEL, steps, to, 32)
                else:
                    _two_by_16(xk, x_row, at, 0, scale, offset, 0, steps, to, 32)
            for i in range(num_rows):
                add_floats(
                    out + (i * out_row + panel * PANEL) * 4, partial[i].ctypes.data, count * PANEL,
                    accumulate or start > 0,
                )  # fmt: skip
        panel += count


@compiled
def multiply_quantised_panels(x, w, first, end, out, accumulate):
    """As `app.kernels.matmul._cpu.multiply_panels` with the packed weights in 8 bits."""
    num_rows, depth = x.shape
    x_row, out_row = x.strides[0] // 4, out.strides[0] // 4
    if 1 <= num_rows <= 2:
        _multiply_few(
            x.ctypes.data, x_row, num_rows, w.levels, w.scales, w.offsets, first, end, out.ctypes.data, out_row,
            accumulate,
        )  # fmt: skip
    elif num_rows > 2:
        scratch = np.empty((depth, PANEL), np.float32)
        for panel in range(first, end):
            expand_panel(w.levels[panel], w.scales[panel], w.offsets[panel], scratch)
            multiply_columns(
                x.ctypes.data, scratch.ctypes.data, 16, 0, 1, depth, out.ctypes.data + panel * 64, accumulate,
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
