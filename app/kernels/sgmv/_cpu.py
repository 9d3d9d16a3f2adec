"""LoRA deltas on the CPU: shrink `h = A x`, expand `y += B h`, per run of tokens with one adapter.

Tables hold rank rows. a: panels of eight rows `[R / 8, d_in, 8]`, so that a shrink reads whole vectors; b: panels
of sixteen columns `[P, R, 16]`, so that an expand reads an adapter's rows in one go. An adapter of rank r
owns rows `row_start` to `row_start + r`; its last panel of a is zero-filled (`_writing`). A token costs its own
adapter's rank and nothing else: no padding to the largest rank, and base tokens (rank 0) are not visited.

An adapter whose values are all bfloat16's is stored in two bytes per value, in the first half of its own memory: what
it owns in a, and of each panel of b, is laid out as described, only narrower. It is half the bytes to read, and the
same bits in every result.

The expand continues the base product's chain of sums in place, so out must hold the base product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import PANEL, multiply_columns
from app.kernels.simd import expand_bf16, multiply_either_tile
from app.kernels.team import leave, take

#: Rank rows of one panel of a: an adapter's rows start at a multiple of this.
RANK_PANEL = 8

#: Tokens of one task of a shrink, and panels of rank rows of one piece of it.
_CHUNK = 12
_PIECE_PANELS = 2

_one_by_two = multiply_either_tile(1, 2, 1)
_one = multiply_either_tile(1, 1, 1)
_four_by_two = multiply_either_tile(4, 2, 1)
_four = multiply_either_tile(4, 1, 1)
_one_by_64 = multiply_either_tile(1, 4, 2)
_one_by_16 = multiply_either_tile(1, 1, 2)


class RowPlaces(NamedTuple):
    """Where and how adapters' rows lie, by adapter slot. starts: [S] int64; in_bf16: [S] bool.

    The kernels also take `starts` alone: then all rows are float32.
    """

    starts: NDArray[np.int64]
    in_bf16: NDArray[np.bool_]


def _place(places, adapter_slot):
    """(first rank row, whether in bfloat16)."""
    raise NotImplementedError("called from compiled code only")


@overload(_place)
def _place_of(places, adapter_slot):
    if isinstance(places, types.Array):
        return lambda places, adapter_slot: (places[adapter_slot], False)
    return lambda places, adapter_slot: (places.starts[adapter_slot], places.in_bf16[adapter_slot])


@compiled
def _shrink_rows(x, x_row, num_rows, a, num_panels, depth, h, h_row, in_bf16=False):
    """h[i, :8 * num_panels] = A @ x[i] for num_rows rows of one adapter; addresses and element strides."""
    step = depth * RANK_PANEL
    step_bytes = step * (2 if in_bf16 else 4)
    i = 0
    while i < num_rows:
        xi, hi = x + i * x_row * 4, h + i * h_row * 4
        p = 0
        if num_rows - i >= 4:
            while p + 2 <= num_panels:
                _four_by_two(xi, x_row, a + p * step_bytes, 8, step, depth, hi + p * 32, h_row, 8, False, in_bf16)
                p += 2
            while p < num_panels:
                _four(xi, x_row, a + p * step_bytes, 8, 0, depth, hi + p * 32, h_row, 0, False, in_bf16)
                p += 1
            i += 4
        else:
            while p + 2 <= num_panels:
                _one_by_two(xi, x_row, a + p * step_bytes, 8, step, depth, hi + p * 32, h_row, 8, False, in_bf16)
                p += 2
            while p < num_panels:
                _one(xi, x_row, a + p * step_bytes, 8, 0, depth, hi + p * 32, h_row, 0, False, in_bf16)
                p += 1
            i += 1


@compiled
def shrink(team, phase, x, tables, ranks, tasks, widest, places, h):
    """h[t, n, :rank] = A_n x[t] for several tables n that share the input (q/k/v; gate/up). One phase.

    x: [T, d_in]. tables: tuple of a-panels [R / 8, d_in, 8]. ranks: [S, N] int32, 0 where an adapter
    leaves module n alone. tasks: [J, 3] int64 (first token, end token, adapter slot), see `shrink_tasks`. widest: at
    least the largest rank among them. places: `RowPlaces`. h: [T, N, W] written in place, W a multiple of 8 and at
    least the largest rank.
    """
    num_tables, depth, done = ranks.shape[1], x.shape[1], 0
    x_row, h_row, h_table = x.strides[0] // 4, h.strides[0] // 4, h.strides[1] // 4
    step = _PIECE_PANELS * RANK_PANEL
    num_parts = (widest + step - 1) // step
    num_pieces = tasks.shape[0] * num_tables * num_parts
    index = take(team, phase)
    while index < num_pieces:
        job = index // num_parts
        first_rank = (index - job * num_parts) * step
        task = job // num_tables
        n = job - task * num_tables
        first, end, adapter_slot = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        rank = min(ranks[adapter_slot, n] - first_rank, step)
        if rank > 0:
            a = 0
            for m in range(num_tables):
                if m == n:
                    a = tables[m].ctypes.data
            start, in_bf16 = _place(places, adapter_slot)
            _shrink_rows(
                x.ctypes.data + first * x_row * 4, x_row, end - first,
                a + (start * 4 + first_rank * (2 if in_bf16 else 4)) * depth, (rank + 7) // 8, depth,
                h.ctypes.data + (first * h_row + n * h_table + first_rank) * 4, h_row, in_bf16,
            )  # fmt: skip
        done += 1
        index = take(team, phase)
    return leave(team, phase, num_pieces, done)


@compiled
def expand_panels(h, n, tables, ranks, runs, places, first, end, out, out_panel):
    """out[t, 16 * (out_panel + first) ...] += B_n h[t, n] for panels first to end of module n. One thread.

    h: [T, N, W]. tables: tuple of b-panels [P, R, 16]. ranks: [S, N]. runs: [G, 3] int64 (first token, end token,
    adapter slot). places: `RowPlaces`. out: [T, ...] in place; it holds the base product.
    """
    h_row, h_table, out_row = h.strides[0] // 4, h.strides[1] // 4, out.strides[0] // 4
    b, num_rows = 0, tables[0].shape[1]
    for m in range(ranks.shape[1]):
        if m == n:
            b = tables[m].ctypes.data
    for g in range(runs.shape[0]):
        start, stop, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        rank = ranks[adapter_slot, n]
        if rank > 0:
            row_start, in_bf16 = _place(places, adapter_slot)
            hi = h.ctypes.data + (start * h_row + n * h_table) * 4
            rows = b + (first * num_rows + row_start) * PANEL * 4
            to = out.ctypes.data + (start * out_row + (out_panel + first) * PANEL) * 4
            if in_bf16:
                _expand_bf16(hi, h_row, stop - start, rows, num_rows, end - first, rank, to, out_row)
            else:
                multiply_columns(
                    hi, rows, PANEL, num_rows * PANEL, end - first, rank, to, True, stop - start, h_row, out_row
                )


@compiled
def _expand_bf16(h, h_row, num_rows, b, table_rows, num_panels, rank, out, out_row):
    """out[i, :16 * num_panels] += h[i, :rank] @ b for num_rows rows; b: bfloat16, panels table_rows * 64 bytes apart.

    Several rows share one widening of each panel.
    """
    p, panel_bytes = 0, table_rows * PANEL * 4
    if num_rows == 1:
        while p + 4 <= num_panels:
            _one_by_64(
                h, h_row, b + p * panel_bytes, PANEL, panel_bytes // 2, rank, out + p * 64, out_row, 16, True, True
            )
            p += 4
        while p < num_panels:
            _one_by_16(h, h_row, b + p * panel_bytes, PANEL, 0, rank, out + p * 64, out_row, 0, True, True)
            p += 1
    else:
        wide = np.empty((rank, PANEL), np.float32)
        while p < num_panels:
            expand_bf16(b + p * panel_bytes, rank * PANEL, wide.ctypes.data)
            multiply_columns(h, wide.ctypes.data, PANEL, 0, 1, rank, out + p * 64, True, num_rows, h_row, out_row)
            p += 1


@compiled
def expand(team, phase, h, n, tables, ranks, runs, places, out):
    """out[t] += B_n h[t, n] over all panels of module n; see `expand_panels`. One phase."""
    num_panels, done = tables[n].shape[0], 0
    index = take(team, phase)
    while index < num_panels:
        expand_panels(h, n, tables, ranks, runs, places, index, index + 1, out, 0)
        done += 1
        index = take(team, phase)
    return leave(team, phase, num_panels, done)


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
