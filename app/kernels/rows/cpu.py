"""One-row operations on the CPU: RMS norm, rotary embedding with the KV write, gated activations.

Each takes T rows and treats every row alone, so a row's bits depend on nothing but its contents.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from app.kernels.machine.compiled import compiled
from app.kernels.machine.team import count_pieces, leave, piece, take
from app.kernels.machine.vectors import EXP_MAX, EXP_MIN, EXP_TERMS, LANES, LN2_HIGH, LN2_LOW, LOG2E
from app.kernels.rows.activation import gate_times_up

#: Rows that one thread takes at a time.
_ROWS = 4


@intrinsic
def _float_from_bits(typingctx, bits):
    """Reinterpret an int32 as float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@compiled
def exp_float32(x):
    """e**x, float32, within 2 ulp; a polynomial without branches or tables, so that loops over it vectorise.

    Range reduction and coefficients: Cephes expf (Moshier 1989). Below -87.3 the result is about 1e-38.
    """
    x = min(max(x, EXP_MIN), EXP_MAX)
    n = math.floor(x * LOG2E + np.float32(0.5))
    r = x - np.float32(n) * LN2_HIGH - np.float32(n) * LN2_LOW
    p = EXP_TERMS[0]
    p = p * r + EXP_TERMS[1]
    p = p * r + EXP_TERMS[2]
    p = p * r + EXP_TERMS[3]
    p = p * r + EXP_TERMS[4]
    p = p * r + EXP_TERMS[5]
    p = p * r * r + r + np.float32(1.0)
    return p * _float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@compiled
def normalise_row(x, weight, eps, size, out):
    """out[:size] = x[:size] / rms(x) * weight (Zhang & Sennrich 2019). The sum runs in eight fixed lanes."""
    lanes = np.zeros(8, np.float32)
    whole = size // 8 * 8
    for i in range(0, whole, 8):
        for lane in range(8):
            lanes[lane] += x[i + lane] * x[i + lane]
    for i in range(whole, size):
        lanes[i - whole] += x[i] * x[i]
    total = np.float32(0.0)
    for lane in range(8):
        total += lanes[lane]
    factor = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@compiled
def rms_norm(team, phase, x, weight, eps, out):
    """out[t] = rms_norm(x[t]) * weight. x, out: [T, H] float32 (out in place); weight: [H]; eps float32. One phase."""
    num_pieces, done = count_pieces(x.shape[0], _ROWS), 0
    index = take(team, phase)
    while index < num_pieces:
        first, end = piece(index, x.shape[0], _ROWS)
        for t in range(first, end):
            normalise_row(x[t], weight, eps, weight.shape[0], out[t])
        done += 1
        index = take(team, phase)
    return leave(team, phase, num_pieces, done)


@compiled
def gather_normed(team, phase, x, rows, weight, eps, out):
    """out[p] = rms_norm(x[rows[p]]) * weight. One phase."""
    num_rows, done = rows.shape[0], 0
    p = take(team, phase)
    while p < num_rows:
        normalise_row(x[rows[p]], weight, eps, weight.shape[0], out[p])
        done += 1
        p = take(team, phase)
    return leave(team, phase, num_rows, done)


@compiled
def _rotate(row, cos, sin):
    """Rotary embedding of one head in place, half-split layout (Su et al. 2021). cos, sin: [rotary / 2]."""
    half = cos.shape[0]
    for i in range(half):
        first, second = row[i], row[i + half]
        row[i] = first * cos[i] - second * sin[i]
        row[i + half] = second * cos[i] + first * sin[i]


@compiled
def rotate_and_store_token(
    t, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads, num_kv_heads, head_dim,
    q_size, kv_size,
):  # fmt: skip
    """One token of `rotate_and_store`."""
    block_size, position = v_memory.shape[2], positions[t]
    block = kv_slots[t] // block_size
    offset = kv_slots[t] - block * block_size
    for head in range(num_heads):
        row = qkv[t, head * head_dim : (head + 1) * head_dim]
        if q_norm.shape[0] > 0:
            normalise_row(row, q_norm, eps, head_dim, row)
        _rotate(row, cos[position], sin[position])
    for head in range(num_kv_heads):
        row = qkv[t, q_size + head * head_dim : q_size + (head + 1) * head_dim]
        if k_norm.shape[0] > 0:
            normalise_row(row, k_norm, eps, head_dim, row)
        _rotate(row, cos[position], sin[position])
        value = q_size + kv_size + head * head_dim
        for i in range(head_dim):
            k_memory[block, head, i, offset] = row[i]
            v_memory[block, head, offset, i] = qkv[t, value + i]


@compiled
def rotate_and_store(
    team, phase, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads, num_kv_heads,
    head_dim, q_size, kv_size,
):  # fmt: skip
    """Normalise (where q_norm, k_norm are not empty) and rotate q and k in place; write k and v to memory. One phase.

    qkv: [T, >= q_size + 2 * kv_size] float32: q, k and v side by side, each slice padded to its size; positions: [T];
    kv_slots: [T]; cos, sin: [positions, rotary / 2]; q_norm, k_norm: [head_dim] or [0].
    k_memory: [blocks, kv_heads, D, block_size], v_memory: [blocks, kv_heads, block_size, D], written in place.
    """
    num_tokens, done = qkv.shape[0], 0
    t = take(team, phase)
    while t < num_tokens:
        rotate_and_store_token(
            t, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads, num_kv_heads,
            head_dim, q_size, kv_size,
        )  # fmt: skip
        done += 1
        t = take(team, phase)
    return leave(team, phase, num_tokens, done)


@compiled
def activate(gate_up, up_start, gelu, first, end, out):
    """out[t, i] = act(gate) * up for columns first to end. gate_up: [T, up_start + I], gate first; out: [T, I].

    act is silu, or gelu with the tanh approximation (Hendrycks & Gimpel 2016).
    """
    whole = (end - first) // LANES * LANES
    for t in range(gate_up.shape[0]):
        gate, up, row = gate_up[t, first:end], gate_up[t, up_start + first : up_start + end], out[t, first:end]
        gate_times_up(gate.ctypes.data, up.ctypes.data, whole, gelu, row.ctypes.data)
        for i in range(whole, end - first):
            z = gate[i]
            if gelu:  # 0.5 * (1 + tanh(z)) is the logistic function of 2 z
                z = np.float32(1.5957691216057308) * (z + np.float32(0.044715) * z * z * z)
            row[i] = gate[i] / (np.float32(1.0) + exp_float32(-z)) * up[i]
