"""Adapters' extra weights on the CPU: everything that changes their rows besides low-rank deltas.

A layer's module becomes `y = scale * (W x + B A x) + shift`, W the base's or the adapter's own; a norm takes the
adapter's own weight; tokens are looked up in, and logits computed from, the adapter's own matrices or rows. The base's
step is computed for the whole batch; then, in the same phase, the rows of adapters with extra weights are changed one
by one. Other rows are not touched and results are batch-invariant. Batches without such rows call nothing of this.

Each array lies where it was allocated. Tables hold the addresses per adapter slot, 0 for none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece
from app.kernels.matmul.cpu import NO_FETCH, PANEL, multiply_columns
from app.kernels.matmul.int8 import multiply_any_panels, num_panels_of, piece_size, prepare_rows
from app.kernels.norms.cpu import NORM_ROWS, gather_normed, normalise_row, rms_norm
from app.kernels.rotary.cpu import rotate_and_store, rotate_and_store_token

Addresses = NDArray[np.int64]

#: Columns of `ExtraTables.norms`.
ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM = range(4)


class ExtraTables(NamedTuple):
    """Addresses of float32 arrays by layer, adapter slot and module (`[L, S, 7]`, as ranks), or by slot (`[S]`).

    scales, shifts: [d_out padded to 16]. weights: packed panels. norms: [L, S, 4] of [H] or [head_dim].
    embed_rows: [n, H] for the token ids (ascending int64) at embed_ids, or all V where num_embed_ids is 0.
    embed_a: [V, r], embed_b: [r, H], r in embed_ranks. head_weight, head_rows: packed [., H, 16], the
    rows for the token ids at head_ids. head_a: packed [., H, 16]; head_b: packed [., r, 16].
    """

    scales: Addresses
    shifts: Addresses
    weights: Addresses
    norms: Addresses
    final_norm: Addresses
    embed_rows: Addresses
    embed_ids: Addresses
    num_embed_ids: Addresses
    embed_a: Addresses
    embed_b: Addresses
    embed_ranks: Addresses
    head_weight: Addresses
    head_rows: Addresses
    head_ids: Addresses
    num_head_ids: Addresses
    head_a: Addresses
    head_b: Addresses
    head_ranks: Addresses


def empty_tables(num_layers: int, num_slots: int, num_modules: int) -> ExtraTables:
    """Tables without any adapter's extra weights."""
    by_module, by_norm = (num_layers, num_slots, num_modules), (num_layers, num_slots, 4)
    shapes = {"scales": by_module, "shifts": by_module, "weights": by_module, "norms": by_norm}
    return ExtraTables._make(np.zeros(shapes.get(name, (num_slots,)), np.int64) for name in ExtraTables._fields)


@intrinsic
def _float_pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), codegen


@intrinsic
def _int_pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@jit
def _floats(address, size):
    return carray(_float_pointer(address), (size,))


@jit
def _panels(num_columns):
    return (num_columns + PANEL - 1) // PANEL


# -- layers -----------------------------------------------------------------------------------


@jit
def _weight_of(addresses, slots, t, weight):
    """The weight at addresses[slots[t]], or the base's where that is 0."""
    address = addresses[slots[t]]
    return weight if address == 0 else _floats(address, weight.shape[0])


@jit
def rms_norm_with_extras(team, phase, x, weight, eps, addresses, slots, out):
    """`rms_norm` with the weight at addresses[slots[t]] where that is not 0.

    addresses: [S]; slots: [T], or [0] for the base alone. One phase.
    """
    if slots.shape[0] == 0:
        return rms_norm(team, phase, x, weight, eps, out)
    num_pieces, done = count_pieces(x.shape[0], NORM_ROWS), 0
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, x.shape[0], NORM_ROWS)
        for t in range(first, end):
            normalise_row(x[t], _weight_of(addresses, slots, t, weight), eps, weight.shape[0], out[t])
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def rotate_and_store_with_extras(
    team, phase, norms, slots, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads,
    num_kv_heads, head_dim, q_size, kv_size,
):  # fmt: skip
    """`rotate_and_store` with the norms at norms[slots[t]] where those are not 0.

    norms: [S, 4]; slots: [T], or [0] for the base alone. One phase.
    """
    if slots.shape[0] == 0:
        return rotate_and_store(
            team, phase, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads,
            num_kv_heads, head_dim, q_size, kv_size,
        )  # fmt: skip
    num_tokens, done = qkv.shape[0], 0
    t = claim_piece(team, phase)
    while t < num_tokens:
        rotate_and_store_token(
            t, qkv, positions, kv_slots, cos, sin, _weight_of(norms[:, Q_NORM], slots, t, q_norm),
            _weight_of(norms[:, K_NORM], slots, t, k_norm), eps, k_memory, v_memory, num_heads, num_kv_heads, head_dim,
            q_size, kv_size,
        )  # fmt: skip
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)


@jit
def change_columns(x, tables, layer, module, runs, first, end, out, out_panel):
    """y = scale * y + shift, y being the adapter's own W x[t] or the contents of out: panels first to end of a module's
    outputs.

    x: [T, d_in]; out: [T, ...] in place, the module's outputs beginning at out_panel. One thread.
    """
    depth, x_row, out_row = x.shape[1], x.strides[0] // 4, out.strides[0] // 4
    column, width = (out_panel + first) * PANEL, (end - first) * PANEL
    for g in range(runs.shape[0]):
        start, stop, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        weight = tables.weights[layer, adapter_slot, module]
        if weight != 0:
            multiply_columns(
                x.ctypes.data + start * x_row * 4, weight + first * depth * PANEL * 4, PANEL, depth * PANEL,
                end - first, depth, out.ctypes.data + (start * out_row + column) * 4, False, stop - start, x_row,
                out_row,
            )  # fmt: skip
        scale = tables.scales[layer, adapter_slot, module]
        if scale != 0:
            factors = _floats(scale + first * PANEL * 4, width)
            for t in range(start, stop):
                for i in range(width):
                    out[t, column + i] *= factors[i]
        shift = tables.shifts[layer, adapter_slot, module]
        if shift != 0:
            terms = _floats(shift + first * PANEL * 4, width)
            for t in range(start, stop):
                for i in range(width):
                    out[t, column + i] += terms[i]


@jit
def changes_sum(tables, layer, adapter_slot, module):
    """Whether `change_columns` scales or replaces a product that is added to a residual."""
    return tables.scales[layer, adapter_slot, module] != 0 or tables.weights[layer, adapter_slot, module] != 0


@jit
def save_rows(tables, layer, module, runs, first, end, out, saved):
    """Before a product is added to out: copy and zero the rows whose product `change_columns` will change."""
    for g in range(runs.shape[0]):
        if changes_sum(tables, layer, runs[g, 2], module):
            for t in range(runs[g, 0], runs[g, 1]):
                for i in range(first * PANEL, end * PANEL):
                    saved[t, i] = out[t, i]
                    out[t, i] = np.float32(0.0)


@jit
def restore_rows(tables, layer, module, runs, first, end, saved, out):
    """After `change_columns`: add back the rows that `save_rows` copied."""
    for g in range(runs.shape[0]):
        if changes_sum(tables, layer, runs[g, 2], module):
            for t in range(runs[g, 0], runs[g, 1]):
                for i in range(first * PANEL, end * PANEL):
                    out[t, i] += saved[t, i]


# -- tokens -----------------------------------------------------------------------------------


@jit
def _first_from(ids, value):
    """Index of the first of ascending ids that is not below value."""
    low, high = 0, ids.shape[0]
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _find(address, count, token):
    """Index of `token` among `count` ascending ids, or -1."""
    ids = carray(_int_pointer(address), (count,))
    index = _first_from(ids, token)
    return index if index < count and ids[index] == token else -1


@jit
def _change_embedding(token, tables, adapter_slot, out):
    width = out.shape[0]
    rows, count = tables.embed_rows[adapter_slot], tables.num_embed_ids[adapter_slot]
    if rows != 0:
        index = token if count == 0 else _find(tables.embed_ids[adapter_slot], count, token)
        if index >= 0:
            row = _floats(rows + index * width * 4, width)
            for i in range(width):
                out[i] = row[i]
    rank = tables.embed_ranks[adapter_slot]
    if rank > 0:
        factors = _floats(tables.embed_a[adapter_slot] + token * rank * 4, rank)
        for r in range(rank):
            row = _floats(tables.embed_b[adapter_slot] + r * width * 4, width)
            for i in range(width):
                out[i] += factors[r] * row[i]


@jit
def change_embeddings(team, phase, token_ids, tables, slots, out):
    """out[t] = the adapter's own row for the token, if it has one, plus its low-rank delta. out: [T, H]. One phase."""
    num_tokens, done = token_ids.shape[0], 0
    t = claim_piece(team, phase)
    while t < num_tokens:
        if slots[t] != 0:
            _change_embedding(np.int64(token_ids[t]), tables, slots[t], out[t])
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)


@jit
def gather_normed_with_extras(team, phase, x, rows, weight, eps, addresses, slots, out):
    """`gather_normed` with the weight at addresses[slots[rows[p]]] where that is not 0.

    slots: [T], or [0] for the base alone. One phase.
    """
    if slots.shape[0] == 0:
        return gather_normed(team, phase, x, rows, weight, eps, out)
    num_rows, done = rows.shape[0], 0
    p = claim_piece(team, phase)
    while p < num_rows:
        normalise_row(x[rows[p]], _weight_of(addresses, slots, rows[p], weight), eps, weight.shape[0], out[p])
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, num_rows, done)


@jit
def extra_head_inputs(team, phase, x, tables, runs, out):
    """Inputs of `head_with_extras` for the sampled rows x [P, H]: logits of the adapter's own rows, then its A x.

    runs: [E, 3] over the rows of x. out: [P, W]: for each row its adapter's panels of head_rows, then of head_a. One
    phase.
    """
    num_panels, done = out.shape[1] // PANEL, 0
    num_pieces = runs.shape[0] * num_panels
    depth, x_row, out_row = x.shape[1], x.strides[0] // 4, out.strides[0] // 4
    index = claim_piece(team, phase)
    while index < num_pieces:
        g = index // num_panels
        panel = index - g * num_panels
        first, end, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        num_row_panels = _panels(tables.num_head_ids[adapter_slot])
        w = np.int64(0)
        if panel < num_row_panels:
            w = tables.head_rows[adapter_slot] + panel * depth * PANEL * 4
        elif panel < num_row_panels + _panels(tables.head_ranks[adapter_slot]):
            w = tables.head_a[adapter_slot] + (panel - num_row_panels) * depth * PANEL * 4
        if w != 0:
            multiply_columns(
                x.ctypes.data + first * x_row * 4, w, PANEL, 0, 1, depth,
                out.ctypes.data + (first * out_row + panel * PANEL) * 4, False, end - first, x_row, out_row,
            )  # fmt: skip
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def _change_logits(x, tables, runs, inputs, first, end, logits):
    """Panels first to end of the logits of the runs' rows; see `head_with_extras`."""
    depth, x_row, out_row = x.shape[1], x.strides[0] // 4, logits.strides[0] // 4
    column = first * PANEL
    for g in range(runs.shape[0]):
        start, stop, adapter_slot = runs[g, 0], runs[g, 1], runs[g, 2]
        out = logits.ctypes.data + (start * out_row + column) * 4
        weight = tables.head_weight[adapter_slot]
        if weight != 0:
            multiply_columns(
                x.ctypes.data + start * x_row * 4, weight + column * depth * 4, PANEL, depth * PANEL, end - first,
                depth, out, False, stop - start, x_row, out_row,
            )  # fmt: skip
        num_ids = tables.num_head_ids[adapter_slot]
        if num_ids > 0:
            ids = carray(_int_pointer(tables.head_ids[adapter_slot]), (num_ids,))
            i = _first_from(ids, column)
            while i < num_ids and ids[i] < end * PANEL:
                for p in range(start, stop):
                    logits[p, ids[i]] = inputs[p, i]
                i += 1
        rank = tables.head_ranks[adapter_slot]
        if rank > 0:
            shrunk = start * inputs.strides[0] + _panels(num_ids) * PANEL * 4
            multiply_columns(
                inputs.ctypes.data + shrunk, tables.head_b[adapter_slot] + column * rank * 4, PANEL, rank * PANEL,
                end - first, rank, out, True, stop - start, inputs.strides[0] // 4, out_row,
            )  # fmt: skip


@jit
def head_with_extras(team, phase, x, w, tables, runs, inputs, logits):
    """logits = x @ w, then those of the runs' rows from their adapters' own matrix or rows, plus their deltas.

    x: [P, H]; w: the base's packed head, either kind; inputs: from `extra_head_inputs`; logits: [P, V padded].
    One phase, and one to prepare x.
    """
    phase = prepare_rows(team, phase, x, w)
    num_panels, done = num_panels_of(w), 0
    size = piece_size(w, x.shape[0], num_panels)
    num_pieces = count_pieces(num_panels, size)
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_panels, size)
        multiply_any_panels(x, w, first, end, logits, False, NO_FETCH)
        _change_logits(x, tables, runs, inputs, first, end, logits)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
