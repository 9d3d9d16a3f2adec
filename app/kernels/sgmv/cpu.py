"""LoRA deltas on the CPU (SGMV): shrink `h = A x`, expand `y += B h`, per run of tokens with one adapter.

Each matrix of an adapter of rank r is one piece of memory, known by its address. a: panels of eight rows `[r / 8, d_in,
8]`, so that a shrink reads whole vectors; the last panel is zero-filled (`adapter_copy`). b: panels of sixteen columns
`[W / 16, r, 16]`, W the module's outputs rounded up to whole panels, so that an expand reads it sequentially. A token
costs its own adapter's rank and nothing else: no padding to the largest rank, and base tokens (rank 0) are skipped.

An adapter whose values are all exact in bfloat16 is stored in two bytes per value in the same layout: half the bytes to
read, and the same bits in every result.

The expand continues the base product's chain of sums in place, so out must hold the base product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import BYTES_AHEAD, multiply_tile
from app.kernels.machine.thread_team import (
    await_pieces,
    claim_piece,
    count_pieces,
    finish_phase,
    piece,
    report_pieces,
)
from app.kernels.matmul.cpu import PANEL, multiply_columns

#: Rank rows of one panel of a: an adapter's rows start at a multiple of this.
RANK_PANEL = 8

#: Tokens of one task of a shrink, and panels of rank rows of one piece of it.
_CHUNK = 12
_PIECE_PANELS = 4
#: Panels of one piece of an expand.
_EXPANDED_PANELS = 12

#: Tiles of a shrink by their panels: enough chains to keep a core busy, few enough for the registers of AVX2. Four
#: panels are enough streams from the second-level cache: two chunks of each were slower.
_CHAINS = 8
_four_panels = multiply_tile(2, 4, 1)
_two_panels = multiply_tile(4, 2, 1, _CHAINS)
_one_panel = multiply_tile(4, 1, 1, _CHAINS)


class ModuleRows(NamedTuple):
    """LoRA rows of N modules side by side (q, k and v; gate and up; or one), by adapter slot.

    a, b: [S, N] int64 addresses, meaningless where the rank is 0. ranks: [S, N] int32, 0 where an adapter does not
    change a module. num_panels: [N] int64, panels of each module's outputs. in_bf16: [S] bool, two bytes per value.
    """

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    ranks: NDArray[np.int32]
    num_panels: NDArray[np.int64]
    in_bf16: NDArray[np.bool_]


@jit
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


@jit
def shrink(team, phase, x, rows, tasks, widest, h):
    """h[t, n, :rank] = A_n x[t] for the modules n of `ModuleRows`, which share the input. One phase.

    x: [T, d_in]. tasks: [J, 3] int64 (first token, end token, adapter slot), see `shrink_tasks`. widest: at least the
    largest rank among them. h: [>= T, >= N, W] written in place, W a multiple of 8 and at least the largest rank.
    """
    num_pieces = begin_shrink(team, phase, x, rows, tasks, widest, h)
    await_pieces(team, phase, num_pieces)
    return phase + 1


@jit
def begin_shrink(team, phase, x, rows, tasks, widest, h):
    """`shrink` without the wait for other threads. Returns the number of pieces, for `await_pieces`."""
    num_modules, depth, done = rows.ranks.shape[1], x.shape[1], 0
    x_row, h_row, h_module = x.strides[0] // 4, h.strides[0] // 4, h.strides[1] // 4
    step = _PIECE_PANELS * RANK_PANEL
    num_parts = (widest + step - 1) // step
    num_pieces = tasks.shape[0] * num_modules * num_parts
    index = claim_piece(team, phase)
    while index < num_pieces:
        job = index // num_parts
        first_rank = (index - job * num_parts) * step
        task = job // num_modules
        n = job - task * num_modules
        first, end, adapter_slot = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        rank = min(rows.ranks[adapter_slot, n] - first_rank, step)
        if rank > 0:
            in_bf16 = rows.in_bf16[adapter_slot]
            shrink_rows(
                x.ctypes.data + first * x_row * 4, x_row, end - first,
                rows.a[adapter_slot, n] + first_rank * (2 if in_bf16 else 4) * depth, (rank + 7) // 8, depth,
                h.ctypes.data + (first * h_row + n * h_module + first_rank) * 4, h_row, in_bf16,
            )  # fmt: skip
        done += 1
        index = claim_piece(team, phase)
    report_pieces(team, phase, done)
    return num_pieces


@jit
def expand_panels(h, n, rows, runs, first, end, out, out_panel):
    """out[t, 16 * (out_panel + first) ...] += B_n h[t, n] for panels first to end of module n. One thread.

    h: [>= T, >= N, W]. rows: `ModuleRows`. runs: [G, 3] int64 (first token, end token, adapter slot). out: [T, ...] in
    place; it holds the base product.
    """
    h_row, h_module, out_row = h.strides[0] // 4, h.strides[1] // 4, out.strides[0] // 4
    for g in range(runs.shape[0]):
        start, stop, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        rank = rows.ranks[adapter_slot, n]
        if rank > 0:
            panels = first_panel(rows, adapter_slot, n, first)
            # A single row is done before memory answers: it prefetches what the next run will read.
            ahead = np.int64(BYTES_AHEAD)
            if stop - start == 1 and g + 1 < runs.shape[0] and rows.ranks[runs[g + 1, 2], n] > 0:
                ahead = first_panel(rows, runs[g + 1, 2], n, first) - panels
            multiply_columns(
                h.ctypes.data + (start * h_row + n * h_module) * 4, panels, PANEL, rank * PANEL, end - first, rank,
                out.ctypes.data + (start * out_row + (out_panel + first) * PANEL) * 4, True, stop - start, h_row,
                out_row, ahead, rows.in_bf16[adapter_slot],
            )  # fmt: skip


@jit
def first_panel(rows, adapter_slot, n, panel):
    """Address of a panel of an adapter's b of module n."""
    size = 2 if rows.in_bf16[adapter_slot] else 4
    return rows.b[adapter_slot, n] + panel * rows.ranks[adapter_slot, n] * PANEL * size


@jit
def expand(team, phase, h, rows, runs, out):
    """out[t] += B_n h[t, n] for all modules n, their columns side by side in out; see `expand_panels`. One phase."""
    num_panels, done = rows.num_panels.sum(), 0
    num_pieces = count_pieces(num_panels, _EXPANDED_PANELS)
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, _EXPANDED_PANELS)
        at = 0
        for n in range(rows.ranks.shape[1]):
            width = rows.num_panels[n]
            low, high = max(first - at, 0), min(end - at, width)
            if low < high:
                expand_panels(h, n, rows, runs, low, high, out, at)
            at += width
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


def adapter_runs(run_starts: NDArray[np.int32], run_adapter_slots: NDArray[np.int32]) -> NDArray[np.int64]:
    """[G', 3] int64 (first token, end token, adapter slot) of the runs that have an adapter."""
    runs = np.stack([run_starts[:-1], run_starts[1:], run_adapter_slots], axis=1).astype(np.int64)
    return runs[run_adapter_slots != 0]


def shrink_tasks(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs cut into pieces of at most `_CHUNK` tokens, so that all threads share a long prefill."""
    pieces = [
        (t, min(t + _CHUNK, end), adapter_slot)
        for first, end, adapter_slot in runs.tolist()
        for t in range(first, end, _CHUNK)
    ]
    return np.array(pieces, np.int64).reshape(-1, 3)
