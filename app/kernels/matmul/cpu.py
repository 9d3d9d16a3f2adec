"""Matrix products with packed weights on the CPU: batch-invariant.

A weight `[N, K]` is packed once into panels `[P, K, 16]` (P = N/16 rounded up, missing columns zero), so that one step
over k reads 64 consecutive bytes. Rows are taken in tiles of up to `MOST_ROWS`, whose sums stay in registers; one to
three rows take several panels at a time, and so do many rows. Every element is one chain of fused multiply-adds in the
order of k (`app.kernels.machine.simd`), so neither the tile nor the thread affects the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import has_feature, jit
from app.kernels.machine.simd import (
    BYTES_AHEAD,
    CHUNK,
    FETCH_UNIT,
    multiply_and_fetch_tile,
    multiply_tile,
    multiply_wide_tile,
)
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece

#: Columns of one panel.
PANEL = 16

#: Rows of the largest tile. A row's sums take one register of AVX-512, of which there are 32, and two of other
#: machines' sixteen: a seventh row would not fit there, and sums kept in memory take three times as long.
MOST_ROWS = 8 if has_feature("avx512f") else 6
#: Rows that the largest tile leaves at least for the next one: fewer cannot keep a core busy.
_LEAST_LEFT = 4

#: Panels that many rows take at a time: a value of x is loaded once for that many weights. With one panel a core that
#: begins two multiply-adds of 64 bytes in a cycle waits for loads: for 16 of them LLVM's model of such a core
#: (llvm-mca, sapphirerapids) counts 10.5 cycles with one panel, 9.1 with two and 8.0, the least, with three; no such
#: machine was available. Zen 4 begins one in a cycle and is as fast either way: 103 to 116 GFLOP/s a core at 16 to 256
#: rows, where 32 a cycle at 3.7 GHz are 118.
MANY_PANELS = 3 if has_feature("avx512f") else 1
#: With more rows than this nothing is prefetched: a product's own work takes longer than what it fetches.
MOST_FETCHING = 64

_four_panels = multiply_tile(1, 4, 2)
_two_panels = multiply_tile(3, 2, 2)
_one_panel = multiply_tile(MOST_ROWS, 1, 2)
_many_panels = multiply_wide_tile(_LEAST_LEFT, MOST_ROWS, MANY_PANELS)
_fetching = multiply_and_fetch_tile(MOST_ROWS)


class Fetch(NamedTuple):
    """Blocks that a product prefetches along the way, evenly, in lines of 64 bytes; see `multiply_and_fetch_tile`.

    The steps of the whole product cover all lines, or one line each if there are fewer steps.
    """

    blocks: int | np.int64
    lines: int


#: Prefetch nothing.
NO_FETCH = Fetch(0, 0)


def pack(w: NDArray[np.float32]) -> NDArray[np.float32]:
    """[N, K] -> panels [ceil(N / 16), K, 16], zero-filled, contiguous."""
    num_columns, depth = w.shape
    panels = np.empty((-(-num_columns // PANEL), depth, PANEL), np.float32)
    pack_into(w, panels)
    return panels


@jit
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


@jit
def multiply_columns(
    x, w, w_k, w_panel, num_panels, depth, out, accumulate, num_rows, x_row, out_row, ahead=0, in_bf16=False,
    blocks=0, step=0, rate=0,
):  # fmt: skip
    """out[i, p * 16 : p * 16 + 16] (+)= x[i, :depth] @ panel p, for num_panels panels.

    x, w, out are addresses; strides are in elements: x_row and out_row between rows, w_k between
    steps of the sum, w_panel between panels. ahead, in_bf16, blocks, step, rate: see `multiply_tile` and
    `multiply_and_fetch_tile`; nothing in bfloat16, and nothing of less than four rows, asks for blocks. One thread.
    """
    p, size = 0, 2 if in_bf16 else 4
    # Few rows read several panels at once: such a long stream keeps memory busy without prefetching.
    if num_rows == 1:
        while p + 4 <= num_panels:
            wp, op = w + p * w_panel * size, out + p * 64
            _four_panels(1, x, x_row, wp, w_k, w_panel, depth, op, out_row, 16, ahead, accumulate, in_bf16)
            p += 4
    if 1 <= num_rows <= 3:
        while p + 2 <= num_panels:
            wp, op = w + p * w_panel * size, out + p * 64
            _two_panels(num_rows, x, x_row, wp, w_k, w_panel, depth, op, out_row, 16, ahead, accumulate, in_bf16)
            p += 2
    # Several tiles of rows read the same weights, chunk by chunk, so that these stay in the first-level cache.
    chunk = CHUNK if num_rows > MOST_ROWS else max(depth, 1)
    fetches = rate > 0 and num_rows > 3 and not in_bf16
    while p < num_panels:
        for start in range(0, max(depth, 1), chunk):
            count, adds = min(chunk, depth - start), accumulate or start > 0
            xp, wp, op = x + start * 4, w + (p * w_panel + start * w_k) * size, out + p * 64
            if fetches:
                _fetching_panel(xp, wp, w_k, count, op, adds, num_rows, x_row, out_row, ahead, blocks, step, rate)
                step += count_steps(num_rows, 1, count)
            else:
                _panel(xp, wp, w_k, count, op, adds, num_rows, x_row, out_row, ahead, in_bf16)
        p += 1


@jit
def tile_rows(num_rows):
    """Rows of the first tile of `num_rows` rows."""
    return num_rows if num_rows <= MOST_ROWS else min(MOST_ROWS, num_rows - _LEAST_LEFT)


@jit
def _panel(x, w, w_k, depth, out, accumulate, num_rows, x_row, out_row, ahead, in_bf16):
    """`multiply_columns` of one panel."""
    i = 0
    while i < num_rows:
        rows = tile_rows(num_rows - i)
        xi, oi = x + i * x_row * 4, out + i * out_row * 4
        _one_panel(rows, xi, x_row, w, w_k, 0, depth, oi, out_row, 0, ahead, accumulate, in_bf16)
        i += rows


@jit
def _fetching_panel(x, w, w_k, depth, out, accumulate, num_rows, x_row, out_row, ahead, blocks, step, rate):
    """`_panel` in float32 with prefetching. A separate function: `_panel` is faster without this code in it."""
    i = 0
    while i < num_rows:
        rows = tile_rows(num_rows - i)
        xi, oi = x + i * x_row * 4, out + i * out_row * 4
        _fetching(rows, xi, x_row, w, w_k, depth, oi, out_row, ahead, accumulate, blocks, step, rate)
        step += depth
        i += rows


@jit
def _multiply_many(x, w, first, end, out, accumulate):
    """`multiply_panels` with more than `MOST_ROWS` rows, `MANY_PANELS` at a time; returns the first panel left."""
    num_rows, depth = x.shape
    x_row, out_row, p = x.strides[0] // 4, out.strides[0] // 4, first
    while p + MANY_PANELS <= end:
        for start in range(0, max(depth, 1), CHUNK):
            count, adds, i = min(CHUNK, depth - start), accumulate or start > 0, 0
            at = w.ctypes.data + (p * depth + start) * 64
            while i < num_rows:
                rows = tile_rows(num_rows - i)
                xi, oi = x.ctypes.data + (i * x_row + start) * 4, out.ctypes.data + (i * out_row + p * PANEL) * 4
                _many_panels(rows, xi, x_row, at, PANEL, depth * PANEL, count, oi, out_row, BYTES_AHEAD, adds)
                i += rows
        p += MANY_PANELS
    return p


@jit
def count_steps(num_rows, num_panels, depth):
    """Number of steps of `multiply_columns` with more than three rows."""
    return num_panels * depth * -(-num_rows // MOST_ROWS)


@jit
def fetch_rate(fetch, num_steps):
    """Lines per step, in units of 1 / FETCH_UNIT, at most one."""
    return min(fetch.lines * FETCH_UNIT // max(num_steps, 1), FETCH_UNIT)


@jit
def panels_per_piece(num_rows, num_panels):
    """Panels that one thread takes at a time: some 10 microseconds of work, and whole tiles."""
    least = 4 if num_rows <= MOST_ROWS or MANY_PANELS == 1 else MANY_PANELS
    size = max(48 // max(num_rows, 1), num_panels // 256, least)
    return size if num_rows <= MOST_ROWS else -(-size // MANY_PANELS) * MANY_PANELS


@jit
def multiply_panels(x, w, first, end, out, accumulate, fetch):
    """out[:, 16 * first : 16 * end] (+)= x @ panels first to end of w; shapes as in `matmul`. One thread."""
    num_rows, depth = x.shape
    if MANY_PANELS > 1 and (num_rows > MOST_FETCHING or (num_rows > MOST_ROWS and fetch.lines == 0)):
        first, fetch = _multiply_many(x, w, first, end, out, accumulate), NO_FETCH
    multiply_columns(
        x.ctypes.data, w.ctypes.data + first * depth * 64, 16, depth * 16, end - first, depth,
        out.ctypes.data + first * 64, accumulate, num_rows, x.strides[0] // 4, out.strides[0] // 4,
        BYTES_AHEAD if num_rows > 3 else 0, False,
        fetch.blocks, 0, fetch_rate(fetch, count_steps(num_rows, end - first, depth)),
    )  # fmt: skip


@jit
def matmul(team, phase, x, w, out, accumulate):
    """x: [M, K] float32, w: packed [P, K, 16], out: [M, >= P * 16] written in place; rows contiguous. One phase.

    `accumulate`: add to what `out` holds. Columns of `out` past N within the last panel are written.
    """
    num_panels, done = w.shape[0], 0
    size = panels_per_piece(x.shape[0], num_panels)
    num_pieces = count_pieces(num_panels, size)
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, size)
        multiply_panels(x, w, first, end, out, accumulate, NO_FETCH)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
