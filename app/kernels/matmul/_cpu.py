"""Products with packed weights on the CPU: the same bits for a row in any company.

A weight `[N, K]` is packed once into panels `[P, K, 16]` (P = N/16 rounded up, missing columns
zero), so that one step over k reads 64 consecutive bytes. Rows are taken in tiles of up to eight, which fill
the sixteen vector registers of AVX2; one to three rows take several panels at a time instead. Every
element is one chain of fused multiply-adds in the order of k (`app.kernels.simd`), so neither the tile nor
the thread can be seen in the result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.simd import BYTES_AHEAD, CHUNK, multiply_tile
from app.kernels.team import count_pieces, leave, piece, take

#: Columns of one panel.
PANEL = 16

_one_by_64 = multiply_tile(1, 4, 2)
_one_by_32 = multiply_tile(1, 2, 2)
_two_by_32 = multiply_tile(2, 2, 2)
_three_by_32 = multiply_tile(3, 2, 2)
_one = multiply_tile(1, 1, 2)
_two = multiply_tile(2, 1, 2)
_three = multiply_tile(3, 1, 2)
_four = multiply_tile(4, 1, 2)
_five = multiply_tile(5, 1, 2)
_six = multiply_tile(6, 1, 2)
_seven = multiply_tile(7, 1, 2)
_eight = multiply_tile(8, 1, 2)


def pack(w: NDArray[np.float32]) -> NDArray[np.float32]:
    """[N, K] -> panels [ceil(N / 16), K, 16], zero-filled, contiguous."""
    num_columns, depth = w.shape
    panels = np.empty((-(-num_columns // PANEL), depth, PANEL), np.float32)
    pack_into(w, panels)
    return panels


@compiled
def pack_into(w, panels):
    """w [N, K] -> panels [ceil(N / 16), K, 16], in place; columns past N become zero."""
    num_columns, depth = w.shape
    for p in range(panels.shape[0]):
        count = min(PANEL, num_columns - p * PANEL)
        for k in range(depth):
            for c in range(count):
                panels[p, k, c] = w[p * PANEL + c, k]
            for c in range(count, PANEL):
                panels[p, k, c] = np.float32(0.0)


@compiled
def multiply_columns(
    x, w, w_k, w_panel, num_panels, depth, out, accumulate, num_rows, x_row, out_row, ahead=0, in_bf16=False
):
    """out[i, p * 16 : p * 16 + 16] (+)= x[i, :depth] @ panel p, for num_panels panels.

    x, w, out are addresses; strides are in elements: x_row and out_row between rows, w_k between
    steps of the sum, w_panel between panels. ahead, in_bf16: see `multiply_tile`. One thread.
    """
    p, size = 0, 2 if in_bf16 else 4
    # Few rows read several panels at once: from one long stream of them memory is busy without `ahead`.
    if num_rows == 1:
        while p + 4 <= num_panels:
            wp, op = w + p * w_panel * size, out + p * 64
            _one_by_64(x, x_row, wp, w_k, w_panel, depth, op, out_row, 16, ahead, accumulate, in_bf16)
            p += 4
    if 1 <= num_rows <= 3:
        while p + 2 <= num_panels:
            wp, op = w + p * w_panel * size, out + p * 64
            if num_rows == 1:
                _one_by_32(x, x_row, wp, w_k, w_panel, depth, op, out_row, 16, ahead, accumulate, in_bf16)
            elif num_rows == 2:
                _two_by_32(x, x_row, wp, w_k, w_panel, depth, op, out_row, 16, ahead, accumulate, in_bf16)
            else:
                _three_by_32(x, x_row, wp, w_k, w_panel, depth, op, out_row, 16, ahead, accumulate, in_bf16)
            p += 2
    # Several tiles of rows read the same weights: chunk by chunk, these stay in the first cache.
    step = CHUNK if num_rows > 8 else max(depth, 1)
    while p < num_panels:
        for start in range(0, max(depth, 1), step):
            _multiply_panel(
                x + start * 4, w + (p * w_panel + start * w_k) * size, w_k, min(step, depth - start), out + p * 64,
                accumulate or start > 0, num_rows, x_row, out_row, ahead, in_bf16,
            )  # fmt: skip
        p += 1


@compiled
def _multiply_panel(x, w, w_k, depth, out, accumulate, num_rows, x_row, out_row, ahead, in_bf16):
    """`multiply_columns` of one panel."""
    i = 0
    while i < num_rows:
        left = num_rows - i
        xi, oi = x + i * x_row * 4, out + i * out_row * 4
        if left == 6 or left > 8:
            _six(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 6
        elif left == 5:
            _five(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 5
        elif left == 4:
            _four(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 4
        elif left == 3:
            _three(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 3
        elif left == 2:
            _two(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 2
        elif left == 1:
            _one(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 1
        elif left == 7:
            _seven(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 7
        else:
            _eight(xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
            i += 8


@compiled
def panels_per_piece(num_rows, num_panels):
    """Panels that one thread takes at a time: some 10 microseconds of work, and whole tiles of few rows."""
    return max(48 // max(num_rows, 1), num_panels // 256, 4)


@compiled
def multiply_panels(x, w, first, end, out, accumulate):
    """out[:, 16 * first : 16 * end] (+)= x @ panels first to end of w; shapes as in `matmul`. One thread."""
    depth = x.shape[1]
    multiply_columns(
        x.ctypes.data, w.ctypes.data + first * depth * 64, 16, depth * 16, end - first, depth,
        out.ctypes.data + first * 64, accumulate, x.shape[0], x.strides[0] // 4, out.strides[0] // 4,
        BYTES_AHEAD if x.shape[0] > 3 else 0,
    )  # fmt: skip


@compiled
def matmul(team, phase, x, w, out, accumulate):
    """x: [M, K] float32, w: packed [P, K, 16], out: [M, >= P * 16] written in place; rows contiguous. One phase.

    `accumulate`: add to what `out` holds. Columns of `out` past N within the last panel are written.
    """
    num_panels, done = w.shape[0], 0
    size = panels_per_piece(x.shape[0], num_panels)
    num_pieces = count_pieces(num_panels, size)
    index = take(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, size)
        multiply_panels(x, w, first, end, out, accumulate)
        done += 1
        index = take(team, phase)
    return leave(team, phase, num_pieces, done)
