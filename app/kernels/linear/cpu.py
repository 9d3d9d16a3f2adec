"""A linear module with all its adapters on the CPU: one pass over the columns.

Base product, bias, deltas and the adapters' own columns are computed for one piece of columns after the other, so that
each is still in the cache when the next is added. Threads go from the shrink to the first product without waiting for
each other: the first expand waits for the whole shrink. Every row has the bits that it has alone: each part adds in one
fixed order and touches only its own adapter's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.activation.cpu import activate
from app.kernels.extra_weights.cpu import ExtraTables, change_columns, restore_rows, save_rows
from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import await_pieces, claim_piece, count_pieces, finish_phase, piece
from app.kernels.matmul.cpu import NO_FETCH, PANEL
from app.kernels.matmul.int8 import multiply_any_panels, num_panels_of, piece_size, prefetches, prepare_rows
from app.kernels.sgmv.cpu import ModuleRows, begin_shrink, expand_panels
from app.kernels.sgmv.prefetch import MOST_BLOCKS, NextShrink, list_fetch, shrink_ranges

Floats = NDArray[np.float32]

#: Panels per piece of a product with deltas: four at a time took a quarter longer to read rows from memory.
_ADAPTED_PANELS = 12


class LinearExtras(NamedTuple):
    """Extra weights of one layer's linear module: its first target, and the runs that have any (empty: nothing is
    done).
    """

    tables: ExtraTables
    layer: int | np.int64
    module: int | np.int64
    runs: NDArray[np.int64]
    saved: Floats


class LinearLora(NamedTuple):
    """LoRA of one layer's linear module in a step. runs, h: see `expand_panels`; tasks, widest: see `shrink`.

    h is scratch; without runs nothing is done.
    """

    rows: ModuleRows
    upcoming: NextShrink
    runs: NDArray[np.int64]
    tasks: NDArray[np.int64]
    widest: int
    h: Floats


@jit
def _fill(out, bias, first, end, accumulate):
    """Initialise columns first to end from their bias; returns whether the product adds to them."""
    if bias.shape[0] == 0:
        return accumulate
    for t in range(out.shape[0]):
        for i in range(first, end):
            out[t, i] = out[t, i] + bias[i] if accumulate else bias[i]
    return True


@jit
def _panels_per_piece(w, num_rows, num_panels, runs):
    """`piece_size`, with more panels for adapters: their rows are read fastest in long pieces."""
    size = piece_size(w, num_rows, num_panels)
    return max(size, _ADAPTED_PANELS) if runs.shape[0] > 0 else size


@jit
def project(team, phase, x, w, bias, accumulate, lora, extras, out):
    """out (+)= x @ w + bias, and the modules' deltas (`LinearLora`). x, w, out: see `matmul`.

    The modules lie side by side in w and out. One phase, one to prepare x, and one with adapters.
    """
    phase = prepare_rows(team, phase, x, w)
    rows, runs, num_shrinks = lora.rows, lora.runs, 0
    if runs.shape[0] > 0:
        num_shrinks = begin_shrink(team, phase, x, rows, lora.tasks, lora.widest, lora.h)
        phase += 1
    num_panels, done = num_panels_of(w), 0
    has_extras = extras.runs.shape[0] > 0
    size = _panels_per_piece(w, x.shape[0], num_panels, runs)
    num_pieces = count_pieces(num_panels, size)
    has_list = prefetches(w) and runs.shape[0] > 0
    blocks = np.empty(MOST_BLOCKS if has_list else 0, np.int64)
    soon, fetch = np.empty((0, 2), np.int64), NO_FETCH
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, size)
        if has_list:
            soon = shrink_ranges(lora.upcoming, runs) if done == 0 else soon
            fetch = list_fetch(rows, runs, first, end, num_panels, soon, blocks)
        if accumulate and has_extras:
            save_rows(extras.tables, extras.layer, extras.module, extras.runs, first, end, out, extras.saved)
        adds = _fill(out, bias, first * PANEL, min(end * PANEL, bias.shape[0]), accumulate)
        multiply_any_panels(x, w, first, end, out, adds, fetch)
        if runs.shape[0] > 0:
            if done == 0:
                await_pieces(team, phase - 1, num_shrinks)
            at = 0
            for n in range(rows.ranks.shape[1]):
                width = rows.num_panels[n]
                low, high = max(first - at, 0), min(end - at, width)
                if low < high:
                    expand_panels(lora.h, n, rows, runs, low, high, out, at)
                    if has_extras:
                        change_columns(
                            x, extras.tables, extras.layer, extras.module + n, extras.runs, low, high, out, at
                        )
                at += width
        if accumulate and has_extras:
            restore_rows(extras.tables, extras.layer, extras.module, extras.runs, first, end, extras.saved, out)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def gate_and_up(team, phase, x, w, bias, lora, extras, gelu, gate_up, gated):
    """gated = act(gate) * up: both products with their deltas, and the activation of the same columns.

    w holds the panels of gate, then those of up; the rest, and the phases, as in `project`.
    """
    phase = prepare_rows(team, phase, x, w)
    rows, runs, num_shrinks = lora.rows, lora.runs, 0
    if runs.shape[0] > 0:
        num_shrinks = begin_shrink(team, phase, x, rows, lora.tasks, lora.widest, lora.h)
        phase += 1
    num_panels, done = num_panels_of(w) // 2, 0
    width = num_panels * PANEL
    size = _panels_per_piece(w, 2 * x.shape[0], num_panels, runs)
    num_pieces = count_pieces(num_panels, size)
    has_list = prefetches(w) and runs.shape[0] > 0
    blocks = np.empty(MOST_BLOCKS if has_list else 0, np.int64)
    soon, fetch = np.empty((0, 2), np.int64), NO_FETCH
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, size)
        if has_list and done == 0:
            soon = shrink_ranges(lora.upcoming, runs)
        for n in range(2):
            at = n * num_panels
            if has_list:
                fetch = list_fetch(rows, runs, at + first, at + end, 2 * num_panels, soon, blocks)
            last = min((at + end) * PANEL, bias.shape[0])
            adds = _fill(gate_up, bias, (at + first) * PANEL, last, False)
            multiply_any_panels(x, w, at + first, at + end, gate_up, adds, fetch)
            if runs.shape[0] > 0:
                if done == 0:
                    await_pieces(team, phase - 1, num_shrinks)
                expand_panels(lora.h, n, rows, runs, first, end, gate_up, at)
            if extras.runs.shape[0] > 0:
                change_columns(x, extras.tables, extras.layer, extras.module + n, extras.runs, first, end, gate_up, at)
        activate(gate_up, width, gelu, first * PANEL, min(end * PANEL, gated.shape[1]), gated)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
