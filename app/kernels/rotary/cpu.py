"""Rotary embedding on the CPU, with the norms of heads before it and the write of keys and values to the cache after
it.

Queries, keys and values lie side by side. Each token is computed by itself: its bits depend on its contents and
position only.
"""

from __future__ import annotations

from app.kernels.cast_bf16.cpu import store_row
from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, finish_phase
from app.kernels.norms.cpu import normalise_row


@jit
def _rotate(row, cos, sin):
    """Rotary embedding of one head in place, half-split layout (Su et al. 2021). cos, sin: [rotary / 2]."""
    half = cos.shape[0]
    for i in range(half):
        first, second = row[i], row[i + half]
        row[i] = first * cos[i] - second * sin[i]
        row[i + half] = second * cos[i] + first * sin[i]


@jit
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
        store_row(row, k_memory[block, head, :, offset])
        store_row(qkv[t, value : value + head_dim], v_memory[block, head, offset])


@jit
def rotate_and_store(
    team, phase, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads, num_kv_heads,
    head_dim, q_size, kv_size,
):  # fmt: skip
    """Normalise (where q_norm, k_norm are not empty) and rotate q and k in place; write k and v to memory. One phase.

    qkv: [T, >= q_size + 2 * kv_size] float32: q, k and v side by side, each slice padded to its size; positions: [T];
    kv_slots: [T]; cos, sin: [positions, rotary / 2]; q_norm, k_norm: [head_dim] or [0].
    k_memory: [blocks, kv_heads, D, block_size], v_memory: [blocks, kv_heads, block_size, D], float32 or bfloat16 in
    uint16, written in place.
    """
    num_tokens, done = qkv.shape[0], 0
    t = claim_piece(team, phase)
    while t < num_tokens:
        rotate_and_store_token(
            t, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, k_memory, v_memory, num_heads, num_kv_heads,
            head_dim, q_size, kv_size,
        )  # fmt: skip
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)
