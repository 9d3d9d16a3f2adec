"""Experts' linear modules with their LoRA deltas on the CPU: one product per expert that has rows.

Rows are sorted by expert (`routing`). Every row passes its own expert with its own adapter's delta of that expert,
before the activation (gate and up) or before the weighted sum (down). Results are batch-invariant: a row's sums run in
the tiles' order, whatever other rows the expert has.

The pieces of a phase are counted by shapes alone, as if every expert that could have rows had some.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.activation.cpu import activate, activate_clamped
from app.kernels.machine.jit import jit
from app.kernels.machine.simd import BYTES_AHEAD
from app.kernels.machine.thread_team import claim_piece, finish_phase
from app.kernels.matmul.cpu import PANEL, multiply_columns
from app.kernels.matmul.int8 import layer_panels, multiply_some_rows, piece_size, prepare_rows
from app.kernels.sgmv.cpu import RANK_PANEL, shrink_rows

#: Pairs per piece of a shrink, for few and for many pairs.
_FEW_PAIRS, _MANY_PAIRS, _MANY = 2, 12, 256


class ExpertRows(NamedTuple):
    """LoRA rows of N modules (gate and up; down) of every expert in one layer.

    a, b: [S, E, N] int64 addresses: panels [r / 8, d_in, 8] and [W / 16, r, 16], see `app.kernels.sgmv.cpu`. ranks: [S,
    E, N] int32, 0 where an adapter does not change a module of an expert. in_bf16: [S] bool: two bytes a value.
    """

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    ranks: NDArray[np.int32]
    in_bf16: NDArray[np.bool_]


@jit
def _end_of_run(pairs, slots, first, end):
    """The end of the run of pairs, all of one expert, that have the first one's adapter."""
    top_k = pairs.experts.shape[1]
    adapter_slot, i = slots[pairs.order[first] // top_k], first + 1
    while i < end and slots[pairs.order[i] // top_k] == adapter_slot:
        i += 1
    return i


@jit
def shrink_pairs(team, phase, x, num_pairs, pairs, slots, rows, h):
    """h[i, n, :rank] = A_n x[i] for the i-th pair in order, A its adapter's of its expert. One phase.

    x: [>= P, d_in]; slots: [T] adapter slots, 0 for the base; rows: `ExpertRows`; h: [>= P, >= N, W] written in place.
    """
    num_modules, depth, done = rows.ranks.shape[2], x.shape[1], 0
    top_k = pairs.experts.shape[1]
    x_row, h_row, h_module = x.strides[0] // 4, h.strides[0] // 4, h.strides[1] // 4
    size = _MANY_PAIRS if num_pairs > _MANY else _FEW_PAIRS
    num_chunks = -(-num_pairs // size)
    num_pieces = num_chunks * num_modules
    index = claim_piece(team, phase)
    while index < num_pieces:
        n, chunk = index // num_chunks, index % num_chunks
        i, end = chunk * size, min((chunk + 1) * size, num_pairs)
        while i < end:
            pair = pairs.order[i]
            expert = pairs.experts[pair // top_k, pair % top_k]
            adapter_slot = slots[pair // top_k]
            stop = _end_of_run(pairs, slots, i, min(end, pairs.starts[expert + 1]))
            rank = rows.ranks[adapter_slot, expert, n]
            if rank > 0:
                shrink_rows(
                    x.ctypes.data + i * x_row * 4, x_row, stop - i, rows.a[adapter_slot, expert, n],
                    (rank + RANK_PANEL - 1) // RANK_PANEL, depth, h.ctypes.data + (i * h_row + n * h_module) * 4, h_row,
                    rows.in_bf16[adapter_slot],
                )  # fmt: skip
            i = stop
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def _add_deltas(pairs, slots, rows, expert, n, first, end, h, out, out_panel):
    """out[i, 16 * (out_panel + first) ...] += B_n h[i, n] for an expert's pairs and panels first to end of module n."""
    h_row, h_module, out_row = h.strides[0] // 4, h.strides[1] // 4, out.strides[0] // 4
    i, stop = pairs.starts[expert], pairs.starts[expert + 1]
    while i < stop:
        until = _end_of_run(pairs, slots, i, stop)
        adapter_slot = slots[pairs.order[i] // pairs.experts.shape[1]]
        rank = np.int64(rows.ranks[adapter_slot, expert, n])
        if rank > 0:
            width = 2 if rows.in_bf16[adapter_slot] else 4
            multiply_columns(
                h.ctypes.data + (i * h_row + n * h_module) * 4,
                rows.b[adapter_slot, expert, n] + first * rank * PANEL * width, PANEL, rank * PANEL, end - first, rank,
                out.ctypes.data + (i * out_row + (out_panel + first) * PANEL) * 4, True, until - i, h_row, out_row,
                BYTES_AHEAD, rows.in_bf16[adapter_slot],
            )  # fmt: skip
        i = until


@jit
def _fill(out, biases, expert, first, end):
    """Initialise panels first to end from an expert's biases; returns whether the product adds to them."""
    if biases.shape[0] == 0:
        return False
    for i in range(out.shape[0]):
        out[i, first * PANEL : end * PANEL] = biases[expert, first * PANEL : end * PANEL]
    return True


@jit
def _pieces(stack, num_pairs, num_experts, num_panels):
    """(experts that may have rows, panels of one piece, pieces per expert)."""
    most = min(num_pairs, num_experts)
    size = min(piece_size(stack, 2 * num_pairs // max(most, 1), num_panels), num_panels)
    return most, size, -(-num_panels // size)


@jit
def experts_gate_and_up(
    team, phase, x, num_pairs, pairs, slots, stack, at, biases, rows, h, gelu, limit, alpha, gate_up, gated
):
    """gated[i] = act(gate(x[i])) * up(x[i]) of the i-th pair's expert, with its adapter's deltas.

    One phase, and one to prepare x.

    stack: packed weights, gate's panels before up's, expert e's at index at + e; biases: [..., 2 * W] likewise, or
    [0, 0]. limit, alpha: see `activate_clamped`; without a limit (0) `gelu` says which activation. slots: [T], or [0]
    where no row has an adapter. gate_up: [>= P, 2 * W], scratch; gated: [>= P, I].
    """
    phase = prepare_rows(team, phase, x[:num_pairs], stack)
    num_experts, half, done = pairs.busy.shape[0], gate_up.shape[1] // (2 * PANEL), 0
    most, size, count = _pieces(stack, num_pairs, num_experts, half)
    num_pieces = most * count
    index = claim_piece(team, phase)
    while index < num_pieces:
        if index // count < pairs.num_busy[0]:
            expert, first = pairs.busy[index // count], index % count * size
            end = min(first + size, half)
            low, high = pairs.starts[expert], pairs.starts[expert + 1]
            panels, columns = layer_panels(stack, at + expert), gate_up[low:high]
            for n in range(2):
                adds = _fill(columns, biases, at + expert, n * half + first, n * half + end)
                multiply_some_rows(x[:num_pairs], low, high, panels, n * half + first, n * half + end, columns, adds)
                if slots.shape[0] > 0:
                    _add_deltas(pairs, slots, rows, expert, n, first, end, h, gate_up, n * half)
            last = min(end * PANEL, gated.shape[1])
            if limit > np.float32(0.0):
                activate_clamped(columns, half * PANEL, limit, alpha, first * PANEL, last, gated[low:high])
            else:
                activate(columns, half * PANEL, gelu, first * PANEL, last, gated[low:high])
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def experts_down(team, phase, x, num_pairs, pairs, slots, stack, at, biases, rows, h, out):
    """out[i] = down(x[i]) of the i-th pair's expert, with its adapter's delta; the rest as above.

    out: [>= P, W].
    """
    phase = prepare_rows(team, phase, x[:num_pairs], stack)
    num_experts, num_panels, done = pairs.busy.shape[0], out.shape[1] // PANEL, 0
    most, size, count = _pieces(stack, num_pairs, num_experts, num_panels)
    num_pieces = most * count
    index = claim_piece(team, phase)
    while index < num_pieces:
        if index // count < pairs.num_busy[0]:
            expert, first = pairs.busy[index // count], index % count * size
            end = min(first + size, num_panels)
            low, high = pairs.starts[expert], pairs.starts[expert + 1]
            adds = _fill(out[low:high], biases, at + expert, first, end)
            multiply_some_rows(
                x[:num_pairs], low, high, layer_panels(stack, at + expert), first, end, out[low:high], adds
            )
            if slots.shape[0] > 0:
                _add_deltas(pairs, slots, rows, expert, 0, first, end, h, out, 0)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
