"""Latent attention on the CPU, directly on latents: decode and chunked prefill in one, batch-invariant.

Queries are taken to latents first ("absorbed": K_h^T q), paged memory holds one latent and one rotated part per token,
and the result is per head a sum of latents, weighed by the softmax, to which `V_h` is applied afterwards. So keys and
values of heads are never written out, and a token takes R + E numbers of memory. Prompts are computed in the same way:
another order of the sums would give a cached prefix other bits than a fresh one.

Scores are products of keys (as rows) with queries (as packed panels of sixteen columns, the heads of a token): latents
lie in memory as values need them, and are not transposed. memory: [blocks, 1, block_size, W], W a multiple of 16, of
which R + E numbers are used; R is a multiple of 16, too. It is float32, or bfloat16 in uint16, which is widened in
groups of keys. Heads come in jobs of sixteen.
"""

from __future__ import annotations

import numpy as np

from app.kernels.cast_bf16.cpu import store_row, widen_row
from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, finish_phase
from app.kernels.matmul.cpu import PANEL, multiply_columns
from app.kernels.paged_attention.softmax import KEYS, softmax_step

#: Queries of one task (`paged_attention.cpu.attention_tasks`), keys of one product.
_TILE_TOKENS, _STEP = 16, 16


@jit
def _turn(row, first, size, cos, sin):
    """Rotate neighbouring pairs of row[first : first + size] by cos and sin [size / 2], in place."""
    for i in range(size // 2):
        one, other = row[first + 2 * i], row[first + 2 * i + 1]
        row[first + 2 * i] = one * cos[i] - other * sin[i]
        row[first + 2 * i + 1] = other * cos[i] + one * sin[i]


@jit
def rotate_and_store(
    team, phase, queries, latents, positions, kv_slots, cos, sin, num_heads, key_size, kv_rank, memory, own
):
    """Rotate queries' and keys' last parts in place, store latents, and gather queries' first parts by head. One phase.

    queries: [T, >= N * (P + E)]; latents: [T, >= R + E], normalised already; cos, sin: [positions, E / 2]. memory: see
    the module, written at kv_slots [T]. own: [>= N * T, P]; head h of token t goes to row h * T + t.
    """
    num_tokens, done, block_size = latents.shape[0], 0, memory.shape[2]
    rope_size = 2 * cos.shape[1]
    t = claim_piece(team, phase)
    while t < num_tokens:
        block, position = kv_slots[t] // block_size, positions[t]
        for head in range(num_heads):
            at = head * (key_size + rope_size)
            own[head * num_tokens + t, :] = queries[t, at : at + key_size]
            _turn(queries[t], at + key_size, rope_size, cos[position], sin[position])
        _turn(latents[t], kv_rank, rope_size, cos[position], sin[position])
        width = kv_rank + rope_size
        store_row(latents[t, :width], memory[block, 0, kv_slots[t] - block * block_size])
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)


@jit
def _pack(queries, absorbed, start, end, first_head, group, num_tokens, key_size, rope_size, scale, packed):
    """Pack a job's scaled queries as columns: row (t - start) * group + g is a column of packed [panels, R + E, 16]."""
    kv_rank = absorbed.shape[1]
    for row in range((end - start) * group):
        t, head = start + row // group, first_head + row % group
        panel, lane = row // PANEL, row % PANEL
        for i in range(kv_rank):
            packed[panel, i, lane] = absorbed[head * num_tokens + t, i] * scale
        at = head * (key_size + rope_size) + key_size
        for i in range(rope_size):
            packed[panel, kv_rank + i, lane] = queries[t, at + i] * scale


@jit
def _attend(packed, first_visible, group, num_tokens, table, memory, widened, by_key, scores, maxima, sums, acc):
    """One job of num_tokens * group rows; those of token i see keys below first_visible + i. acc / sums is the result.

    packed: [panels, R + E, 16]; widened: [KEYS, W] for memory in bfloat16, by_key: [KEYS, panels * 16], scores: [rows,
    KEYS], maxima, sums: scratch; acc: [rows, R].
    """
    num_rows, width, kv_rank = num_tokens * group, packed.shape[1], acc.shape[1]
    num_panels, block_size, row_size = -(-num_rows // PANEL), memory.shape[2], memory.shape[3]
    end_key = first_visible + num_tokens - 1  # the last token's; keys beyond it may be anything
    acc[:num_rows] = np.float32(0.0)
    sums[:num_rows] = np.float32(0.0)
    maxima[:num_rows] = np.float32(-np.inf)
    for base in range(0, end_key, KEYS):
        end_of_group = min(base + KEYS, end_key)
        if memory.itemsize == 2:
            for key in range(base, end_of_group):
                widen_row(memory[table[key // block_size], 0, key % block_size], widened[key - base])
        for key in range(base, end_of_group, _STEP):
            at = _latent(memory, table, key, widened, base)
            multiply_columns(
                at, packed.ctypes.data, PANEL, width * PANEL, num_panels, width,
                by_key.ctypes.data + (key - base) * by_key.strides[0], False, min(_STEP, end_of_group - key), row_size,
                by_key.shape[1],
            )  # fmt: skip
        first_row = max(base + 1 - first_visible, 0) * group
        for row in range(first_row, num_rows):
            count = min(first_visible + row // group - base, KEYS)
            for key in range(count):
                scores[row, key] = by_key[key, row]
            softmax_step(
                scores.ctypes.data + row * KEYS * 4, 0, count, maxima.ctypes.data + row * 4, sums.ctypes.data + row * 4,
                acc.ctypes.data + row * kv_rank * 4, kv_rank,
            )  # fmt: skip
        for key in range(base, end_of_group, _STEP):
            at = _latent(memory, table, key, widened, base)
            row = max(key + 1 - first_visible, 0) * group
            multiply_columns(
                scores.ctypes.data + (row * KEYS + key - base) * 4, at, row_size, PANEL, kv_rank // PANEL,
                min(_STEP, end_key - key), acc.ctypes.data + row * kv_rank * 4, True, num_rows - row, KEYS, kv_rank,
            )  # fmt: skip


@jit
def _latent(memory, table, key, widened, base):
    """The address of a key's latent in float32."""
    row_size, block_size = memory.shape[3], memory.shape[2]
    if memory.itemsize == 2:
        return widened.ctypes.data + (key - base) * row_size * 4
    return memory.ctypes.data + (table[key // block_size] * block_size + key % block_size) * row_size * 4


@jit
def latent_attention(
    team, phase, queries, absorbed, num_heads, key_size, rope_size, scale, tasks, query_starts, seq_lens, block_tables,
    memory,
):  # fmt: skip
    """Turn every absorbed query into its head's sum of latents, in place; `reference` defines both. One phase.

    queries: [T, >= N * (P + E)], of which the rotated parts are read; absorbed: [>= N * T, R], head h of token t in row
    h * T + t. tasks: [J, 2] int64 (sequence, first query). memory: see the module.
    """
    num_tokens, kv_rank = queries.shape[0], absorbed.shape[1]
    num_groups, done = -(-num_heads // PANEL), 0
    num_pieces = tasks.shape[0] * num_groups
    most = min(_TILE_TOKENS, num_tokens) * min(num_heads, PANEL)
    panels = -(-most // PANEL)
    packed = np.zeros((panels, kv_rank + rope_size, PANEL), np.float32)
    by_key, scores = np.empty((KEYS, panels * PANEL), np.float32), np.empty((most, KEYS), np.float32)
    acc = np.empty((most, kv_rank), np.float32)
    maxima, sums = np.empty(most, np.float32), np.empty(most, np.float32)
    widened = np.empty((KEYS if memory.itemsize == 2 else 0, memory.shape[3]), np.float32)
    job = claim_piece(team, phase)
    while job < num_pieces:
        task, first_head = job // num_groups, job % num_groups * PANEL
        b, group = tasks[task, 0], min(PANEL, num_heads - first_head)
        start = query_starts[b] + tasks[task, 1]
        end = min(start + _TILE_TOKENS, query_starts[b + 1])
        first_visible = seq_lens[b] - (query_starts[b + 1] - start) + 1
        _pack(queries, absorbed, start, end, first_head, group, num_tokens, key_size, rope_size, scale, packed)
        _attend(
            packed, first_visible, group, end - start, block_tables[b], memory, widened, by_key, scores, maxima, sums,
            acc,
        )  # fmt: skip
        for row in range((end - start) * group):
            place = (first_head + row % group) * num_tokens + start + row // group
            for i in range(kv_rank):
                absorbed[place, i] = acc[row, i] / sums[row]
        done += 1
        job = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def bring_heads_together(team, phase, values, num_heads, out):
    """out[t, h * V + i] = values[h * T + t, i]; values: [>= N * T, >= V], out: [T, N * V]. One phase."""
    num_tokens, done = out.shape[0], 0
    size = out.shape[1] // num_heads
    t = claim_piece(team, phase)
    while t < num_tokens:
        for head in range(num_heads):
            out[t, head * size : (head + 1) * size] = values[head * num_tokens + t, :size]
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)
