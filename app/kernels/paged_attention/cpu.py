"""Paged attention on the CPU: decode and chunked prefill in one, batch-invariant.

One task is a sequence, a KV head and up to `_TILE_TOKENS` consecutive queries; its rows are the (query, head) pairs
that share the KV head. Keys come in groups of `KEYS` in order, with an online softmax (Milakov & Gimelshein 2018): a
row's bits depend only on its own keys, however queries are chunked, batched or tiled. If a row sees a group only in
part (the diagonal, a window's edge), the other keys count as exactly nothing: their probability is zero, and only keys
that the task's last query sees, all of the same sequence, are multiplied with it. Memory beyond them may be unused or
hold anything.

k_memory is [blocks, kv_heads, D, block_size] (a vector of scores is a vector of neighbours), v_memory [blocks,
kv_heads, block_size, D]. D is a multiple of 16, block_size too. Both are float32, or bfloat16 in uint16, whose
numbers products widen: the bits are those of float32 memory with the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import exp_float32
from app.kernels.machine.thread_team import claim_piece, finish_phase
from app.kernels.matmul.cpu import multiply_columns
from app.kernels.paged_attention.softmax import KEYS, softmax_step
from app.kernels.softcap.cpu import cap_value

#: Queries of one task.
_TILE_TOKENS = 16
#: Keys of one product: blocks are multiples of it.
_STEP = 16


@jit
def _attend(
    queries, first_visible, group, window, softcap, table, head, k_memory, v_memory, scores, maxima, sums, acc, after
):  # fmt: skip
    """Compute one task.

    queries: [rows, D], scaled; the rows of token i (group of them) see keys below first_visible + i. acc, sums, maxima:
    [rows, ...] scratch; on return acc / sums is the result. Each product prefetches what the next one reads, the last
    one `after`, an address of keys.
    """
    num_rows, width = queries.shape
    block_size = v_memory.shape[2]
    num_tokens = num_rows // group
    end_key = first_visible + num_tokens - 1  # the last token's; keys beyond it may be anything
    acc[:num_rows] = np.float32(0.0)
    sums[:num_rows] = np.float32(0.0)
    maxima[:num_rows] = np.float32(-np.inf)
    keys, values = k_memory.ctypes.data, v_memory.ctypes.data
    size = k_memory.itemsize
    in_bf16 = size == 2
    for base in range(_first_key(first_visible, window), end_key, KEYS):
        end_of_group = min(base + KEYS, end_key)
        # Tokens that see any key of this group; `_first_token` skips those that come before a key.
        end_token = num_tokens
        if window > 0:
            end_token = min(base + KEYS + window - first_visible, num_tokens)
        at = keys + _offset(k_memory, table, head, base, 1) * size
        for key in range(base, end_of_group, _STEP):
            row = _first_token(key, first_visible) * group
            following = values + _offset(v_memory, table, head, base, width) * size
            if key + _STEP < end_of_group:
                following = keys + _offset(k_memory, table, head, key + _STEP, 1) * size
            multiply_columns(
                queries.ctypes.data + row * width * 4, at, block_size, 0, 1, width,
                scores.ctypes.data + (row * KEYS + key - base) * 4, False, end_token * group - row, width, KEYS,
                following - at, in_bf16,
            )  # fmt: skip
            at = following
        for token in range(_first_token(base, first_visible), end_token):
            visible = first_visible + token
            low = 0
            if window > 0:
                low = max(visible - window - base, 0)
            for row in range(token * group, (token + 1) * group):
                if softcap > np.float32(0.0):
                    for column in range(low, min(visible - base, KEYS)):
                        scores[row, column] = cap_value(scores[row, column], softcap)
                softmax_step(
                    scores.ctypes.data + row * KEYS * 4, low, min(visible - base, KEYS), maxima.ctypes.data + row * 4,
                    sums.ctypes.data + row * 4, acc.ctypes.data + row * width * 4, width,
                )  # fmt: skip
        for key in range(base, end_of_group, _STEP):
            row, following = _first_token(key, first_visible) * group, after
            if key + _STEP < end_of_group:
                following = values + _offset(v_memory, table, head, key + _STEP, width) * size
            elif end_of_group < end_key:
                following = keys + _offset(k_memory, table, head, end_of_group, 1) * size
            multiply_columns(
                scores.ctypes.data + (row * KEYS + key - base) * 4, at, width, 16, width // 16,
                min(_STEP, end_key - key), acc.ctypes.data + row * width * 4, True, end_token * group - row, KEYS,
                width, following - at, in_bf16,
            )  # fmt: skip
            at = following


@jit
def _first_key(first_visible, window):
    """A task's first key: the first token sees keys below first_visible, `window` of them if not 0."""
    return max(0, first_visible - window) // KEYS * KEYS if window > 0 else 0


@jit
def _first_token(key, first_visible):
    """The first token of a task that sees `key`: token i sees keys below first_visible + i."""
    return max(key + 1 - first_visible, 0)


@jit
def _offset(memory, table, head, key, stride):
    """Offset of `key` in elements; keys of a block are `stride` apart in k_memory or v_memory."""
    block_size = memory.shape[2] if stride != 1 else memory.shape[3]
    block = table[key // block_size]
    return (block * memory.shape[1] + head) * memory.shape[2] * memory.shape[3] + key % block_size * stride


@jit
def paged_attention(
    team, phase, q, head_dim, scale, window, softcap, sinks, tasks, query_starts, seq_lens, block_tables, k_memory,
    v_memory, out,
):  # fmt: skip
    """out[t, head] = softmax(scale * q k^T) v over the visible keys; see `reference.paged_attention`. One phase.

    q: [T, >= heads * head_dim] float32. window, softcap (float32): 0 for none. sinks: [heads] float32 or
    [0], one more score of each head's softmax, which has no value. tasks: [J, 2] int64 (sequence, first query), see
    `attention_tasks`. k_memory, v_memory: see the module. out: [T, heads * head_dim], in place.
    """
    num_kv_heads, width = v_memory.shape[1], v_memory.shape[3]
    group = out.shape[1] // head_dim // num_kv_heads
    most = min(_TILE_TOKENS, out.shape[0]) * group
    all_queries = np.zeros((most, width), np.float32)
    scores, acc = np.empty((most, KEYS), np.float32), np.empty((most, width), np.float32)
    maxima, sums = np.empty(most, np.float32), np.empty(most, np.float32)
    num_pieces, done = tasks.shape[0] * num_kv_heads, 0
    job = claim_piece(team, phase)
    while job < num_pieces:
        next_job = claim_piece(team, phase)
        head, b, start, first_visible = _task(job, num_kv_heads, tasks, query_starts, seq_lens)
        after = np.int64(k_memory.ctypes.data)
        if next_job < num_pieces:
            next_head, next_b, _, next_visible = _task(next_job, num_kv_heads, tasks, query_starts, seq_lens)
            first_key = _first_key(next_visible, window)
            after += _offset(k_memory, block_tables[next_b], next_head, first_key, 1) * k_memory.itemsize
        end = min(start + _TILE_TOKENS, query_starts[b + 1])
        queries = all_queries[: (end - start) * group]
        for t in range(start, end):
            for g in range(group):
                column = (head * group + g) * head_dim
                for i in range(head_dim):
                    queries[(t - start) * group + g, i] = q[t, column + i] * scale
        _attend(
            queries, first_visible, group, window, softcap, block_tables[b], head, k_memory, v_memory, scores, maxima,
            sums, acc, after,
        )  # fmt: skip
        for t in range(start, end):
            for g in range(group):
                column, row = (head * group + g) * head_dim, (t - start) * group + g
                total = sums[row]
                if sinks.shape[0] > 0:
                    total += exp_float32(sinks[head * group + g] - maxima[row])
                for i in range(head_dim):
                    out[t, column + i] = acc[row, i] / total
        done += 1
        job = next_job
    return finish_phase(team, phase, num_pieces, done)


@jit
def _task(job, num_kv_heads, tasks, query_starts, seq_lens):
    """KV head, sequence, first row of q, and what `_attend` calls first_visible."""
    b = tasks[job // num_kv_heads, 0]
    start = query_starts[b] + tasks[job // num_kv_heads, 1]
    return job % num_kv_heads, b, start, seq_lens[b] - (query_starts[b + 1] - start) + 1


def attention_tasks(query_starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """[J, 2] int64 (sequence, first query): pieces of at most `_TILE_TOKENS` queries."""
    pieces = [
        (b, first) for b, count in enumerate(np.diff(query_starts).tolist()) for first in range(0, count, _TILE_TOKENS)
    ]
    return np.array(pieces, np.int64).reshape(-1, 2)
