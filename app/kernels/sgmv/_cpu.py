"""LoRA deltas on the CPU: shrink `h = A x`, expand `y += B h`, per run of tokens with one adapter.

Tables hold rank rows. a: panels of eight rows `[R / 8, d_in, 8]`, so that a shrink reads whole vectors; b:
`[R, d_out]`, one row per rank. An adapter of rank r owns rows `row_start` to `row_start + r`; its
last panel of a is zero-filled. A token costs its own adapter's rank and nothing else: no padding to
the largest rank, and base tokens (rank 0) are not visited.

The expand continues the base product's chain of sums in place, so out must hold the base product.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy.typing import NDArray

from app.kernels.compiled import compiled, compiled_parallel
from app.kernels.matmul._cpu import multiply_columns
from app.kernels.simd import multiply_tile

#: Rank rows of one panel of a: an adapter's rows start at a multiple of this.
RANK_PANEL = 8

#: Tokens of one task of a shrink.
_CHUNK = 12

_one_by_four = multiply_tile(1, 4, 1)
_one_by_two = multiply_tile(1, 2, 1)
_one = multiply_tile(1, 1, 1)
_four_by_two = multiply_tile(4, 2, 1)
_four = multiply_tile(4, 1, 1)


@compiled
def write_rows(a, b, row_start, a_table, b_table):
    """Copy one module's rows into its tables: a [r, d_in] to panels, b [r, d_out] to rows; see the module.

    a_table: [R / 8, d_in, 8] and b_table: [R, >= d_out], in place. row_start is a multiple of 8.
    """
    rank, depth = a.shape
    for panel in range((rank + RANK_PANEL - 1) // RANK_PANEL):
        to = a_table[row_start // RANK_PANEL + panel]
        first = panel * RANK_PANEL
        count = min(RANK_PANEL, rank - first)
        for k in range(depth):
            for lane in range(count):
                to[k, lane] = a[first + lane, k]
            for lane in range(count, RANK_PANEL):
                to[k, lane] = np.float32(0.0)
    for row in range(rank):
        b_table[row_start + row, : b.shape[1]] = b[row]


@compiled
def _shrink_rows(x, x_row, num_rows, a, num_panels, depth, h, h_row):
    """h[i, :8 * num_panels] = A @ x[i] for num_rows rows of one adapter; addresses and element strides."""
    step = depth * RANK_PANEL
    i = 0
    while i < num_rows:
        xi, hi = x + i * x_row * 4, h + i * h_row * 4
        p = 0
        if num_rows - i >= 4:
            while p + 2 <= num_panels:
                _four_by_two(xi, x_row, a + p * step * 4, 8, step, depth, hi + p * 32, h_row, 8, False)
                p += 2
            while p < num_panels:
                _four(xi, x_row, a + p * step * 4, 8, 0, depth, hi + p * 32, h_row, 0, False)
                p += 1
            i += 4
        else:
            while p + 4 <= num_panels:
                _one_by_four(xi, x_row, a + p * step * 4, 8, step, depth, hi + p * 32, h_row, 8, False)
                p += 4
            while p + 2 <= num_panels:
                _one_by_two(xi, x_row, a + p * step * 4, 8, step, depth, hi + p * 32, h_row, 8, False)
                p += 2
            while p < num_panels:
                _one(xi, x_row, a + p * step * 4, 8, 0, depth, hi + p * 32, h_row, 0, False)
                p += 1
            i += 1


@compiled_parallel
def shrink(x, tables, ranks, tasks, row_starts, h):
    """h[t, n, :rank] = A_n x[t] for several tables n that share the input (q/k/v; gate/up).

    x: [T, d_in]. tables: tuple of a-panels [R / 8, d_in, 8]. ranks: [S, N] int32, 0 where an adapter
    leaves module n alone. tasks: [J, 3] int64 (first token, end token, adapter slot), see `shrink_tasks`.
    row_starts: [S] int64. h: [T, N, W] written in place, W a multiple of 8 and at least the largest rank.
    """
    num_tables = ranks.shape[1]
    depth = x.shape[1]
    x_row, h_row, h_table = x.strides[0] // 4, h.strides[0] // 4, h.strides[1] // 4
    for job in prange(tasks.shape[0] * num_tables):
        task = job // num_tables
        n = job - task * num_tables
        first, end, adapter_slot = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        rank = ranks[adapter_slot, n]
        if rank > 0:
            a = 0
            for m in range(num_tables):
                if m == n:
                    a = tables[m].ctypes.data
            _shrink_rows(
                x.ctypes.data + first * x_row * 4, x_row, end - first,
                a + row_starts[adapter_slot] * depth * 4, (rank + 7) // 8, depth,
                h.ctypes.data + (first * h_row + n * h_table) * 4, h_row,
            )  # fmt: skip


@compiled
def expand_columns(b, d_out, h, h_row, runs, ranks, row_starts, first_panel, num_panels, out, out_row):
    """out[t, 16 * first_panel ...] += B h[t] for the tokens of every run; one thread's columns.

    b: address of [R, d_out] (d_out a multiple of 16). h: address of the table's [T, :] with row stride
    h_row. runs: [G, 3] int64 (first, end, adapter slot). ranks: [S]. out: address of the module's
    first column in row 0.
    """
    for g in range(runs.shape[0]):
        first, end, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        rank = ranks[adapter_slot]
        if rank > 0:
            multiply_columns(
                h + first * h_row * 4, b + (row_starts[adapter_slot] * d_out + first_panel * 16) * 4, d_out, 16,
                num_panels, rank, out + (first * out_row + first_panel * 16) * 4, True, end - first, h_row, out_row,
            )  # fmt: skip


@compiled_parallel
def expand(h, b, runs, ranks, row_starts, out, num_threads):
    """out[t, :] += B h[t]. h: [T, W]; b: [R, d_out]; ranks: [S]; out: [T, d_out], in place; see `expand_columns`."""
    num_panels = b.shape[1] // 16
    for thread in prange(num_threads):
        first = thread * num_panels // num_threads
        last = (thread + 1) * num_panels // num_threads
        expand_columns(
            b.ctypes.data, b.shape[1], h.ctypes.data, h.strides[0] // 4, runs, ranks, row_starts, first, last - first,
            out.ctypes.data, out.strides[0] // 4,
        )  # fmt: skip


def adapter_runs(run_starts: NDArray[np.int32], run_adapter_slots: NDArray[np.int32]) -> NDArray[np.int64]:
    """[G', 3] int64 (first token, end token, adapter slot) of the runs that are not the base's."""
    runs = np.stack([run_starts[:-1], run_starts[1:], run_adapter_slots], axis=1).astype(np.int64)
    return runs[run_adapter_slots != 0]


def shrink_tasks(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs cut into pieces of at most `_CHUNK` tokens, so that one long prefill is shared by all threads."""
    pieces = [
        (t, min(t + _CHUNK, end), adapter_slot)
        for first, end, adapter_slot in runs.tolist()
        for t in range(first, end, _CHUNK)
    ]
    return np.array(pieces, np.int64).reshape(-1, 3)
