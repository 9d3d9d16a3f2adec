"""LoRA deltas on the CPU: shrink `h = A x`, expand `y += B h`, per run of tokens with one adapter.

Tables hold rank rows; an adapter of rank r owns rows `row_start` to `row_start + r`. a: panels of eight rows
`[R / 8, d_in, 8]`, so that a shrink reads whole vectors; the adapter's last panel is zero-filled (`_writing`). b:
`[R, W]`, W the module's outputs rounded up to whole panels of 16; what the adapter owns is one piece of memory, laid
out as panels of sixteen columns `[W / 16, r, 16]`, so that an expand reads it from its beginning to its end. A token
costs its own adapter's rank and nothing else: no padding to the largest rank, and base tokens (rank 0) are not visited.

An adapter whose values are all bfloat16's is stored in two bytes per value, in the first half of its own memory, laid
out as described, only narrower. It is half the bytes to read, and the same bits in every result.

The expand continues the base product's chain of sums in place, so out must hold the base product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.compiled import compiled
from app.kernels.machine.simd import BYTES_AHEAD, multiply_tile
from app.kernels.machine.team import count_pieces, leave, piece, take
from app.kernels.matmul.cpu import PANEL, multiply_columns

#: Rank rows of one panel of a: an adapter's rows start at a multiple of this.
RANK_PANEL = 8

#: Tokens of one task of a shrink, and panels of rank rows of one piece of it.
_CHUNK = 12
_PIECE_PANELS = 4
#: Panels of one piece of an expand.
_EXPANDED_PANELS = 12

#: Tiles of a shrink by their panels: chains enough to keep a core busy, few enough for the registers of AVX2. Four
#: panels are streams enough from the second cache: two chunks of each were slower.
_CHAINS = 8
_four_panels = multiply_tile(2, 4, 1)
_two_panels = multiply_tile(4, 2, 1, _CHAINS)
_one_panel = multiply_tile(4, 1, 1, _CHAINS)


class RowPlaces(NamedTuple):
    """Where and how adapters' rows lie, by adapter slot. starts: [S] int64; in_bf16: [S] bool."""

    starts: NDArray[np.int64]
    in_bf16: NDArray[np.bool_]


@compiled
def shrink_rows(x, x_row, num_rows, a, num_panels, depth, h, h_row, in_bf16):
    """h[i, :8 * num_panels] = A @ x[i] for num_rows rows of one adapter; addresses and element strides."""
    step = depth * RANK_PANEL
    step_bytes = step * (2 if in_bf16 else 4)
    for i in range(0, num_rows, 4):
        p, rows = 0, min(num_rows - i, 4)
        xi, hi = x + i * x_row * 4, h + i * h_row * 4
        while rows <= 2 and p + 4 <= num_panels:
            ap, hp = a + p * step_bytes, hi + p * RANK_PANEL * 4
            _four_panels(rows, xi, x_row, ap, 8, step, depth, hp, h_row, 8, BYTES_AHEAD, False, in_bf16)
            p += 4
        while p + 2 <= num_panels:
            ap, hp = a + p * step_bytes, hi + p * RANK_PANEL * 4
            _two_panels(rows, xi, x_row, ap, 8, step, depth, hp, h_row, 8, BYTES_AHEAD, False, in_bf16)
            p += 2
        if p < num_panels:
            ap, hp = a + p * step_bytes, hi + p * RANK_PANEL * 4
            _one_panel(rows, xi, x_row, ap, 8, 0, depth, hp, h_row, 0, BYTES_AHEAD, False, in_bf16)


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
            a, _ = address_and_width(tables, n)
            start, in_bf16 = places.starts[adapter_slot], places.in_bf16[adapter_slot]
            shrink_rows(
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

    h: [T, N, W]. tables: tuple of b, [R, W]. ranks: [S, N]. runs: [G, 3] int64 (first token, end token,
    adapter slot). places: `RowPlaces`. out: [T, ...] in place; it holds the base product.
    """
    h_row, h_table, out_row = h.strides[0] // 4, h.strides[1] // 4, out.strides[0] // 4
    b, width = address_and_width(tables, n)
    for g in range(runs.shape[0]):
        start, stop, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        rank = ranks[adapter_slot, n]
        if rank > 0:
            panels = b + first_panel(rank, places, adapter_slot, width, first)
            # A lone row is done before memory answers: it asks for what the next run will read.
            ahead = np.int64(BYTES_AHEAD)
            if stop - start == 1 and g + 1 < runs.shape[0]:
                later = runs[g + 1, 2]
                ahead = b + first_panel(ranks[later, n], places, later, width, first) - panels
            multiply_columns(
                h.ctypes.data + (start * h_row + n * h_table) * 4, panels, PANEL, rank * PANEL, end - first, rank,
                out.ctypes.data + (start * out_row + (out_panel + first) * PANEL) * 4, True, stop - start, h_row,
                out_row, ahead, places.in_bf16[adapter_slot],
            )  # fmt: skip


@compiled
def address_and_width(tables, n):
    """One of the tables' address, and the length of its second axis; a tuple of arrays has no other index."""
    address, width = np.int64(0), 0
    for m in range(len(tables)):
        if m == n:
            address, width = np.int64(tables[m].ctypes.data), tables[m].shape[1]
    return address, width


@compiled
def first_panel(rank, places, adapter_slot, width, panel):
    """Bytes from the beginning of a table to a panel of an adapter."""
    size = 2 if places.in_bf16[adapter_slot] else 4
    return places.starts[adapter_slot] * width * 4 + panel * rank * PANEL * size


@compiled
def expand(team, phase, h, tables, ranks, runs, places, out):
    """out[t] += B_n h[t, n] for all modules n, their columns side by side in out; see `expand_panels`. One phase."""
    num_panels, done = 0, 0
    for n in range(ranks.shape[1]):
        num_panels += address_and_width(tables, n)[1] // PANEL
    num_pieces = count_pieces(num_panels, _EXPANDED_PANELS)
    index = take(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, _EXPANDED_PANELS)
        at = 0
        for n in range(ranks.shape[1]):
            _, columns = address_and_width(tables, n)
            width = columns // PANEL
            low, high = max(first - at, 0), min(end - at, width)
            if low < high:
                expand_panels(h, n, tables, ranks, runs, places, low, high, out, at)
            at += width
        done += 1
        index = take(team, phase)
    return leave(team, phase, num_pieces, done)


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
