"""Paged attention on the CPU: decode and chunked prefill in one, bit-identical in any company.

One task is a sequence, a KV head and up to `_TILE_TOKENS` consecutive queries; its rows are the (query,
head) pairs that share the KV head. Keys come in groups of 16 in order, with an online softmax (Milakov &
Gimelshein 2018): a row's bits depend only on its own keys, however queries are chunked, batched
or tiled. A group that a row sees only in part (the diagonal, a window's edge) is computed over exactly the
visible keys, so memory beyond them, which may belong to nobody or hold anything, is never added in.

k_memory is [blocks, kv_heads, D, block_size] (a vector of scores is a vector of neighbours), v_memory
[blocks, kv_heads, block_size, D]. D is a multiple of 16, block_size too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import multiply_columns
from app.kernels.rows._cpu import exp_float32
from app.kernels.team import leave, take

#: Queries of one task.
_TILE_TOKENS = 16
#: Keys per softmax update.
_KEYS = 16


@compiled
def _update(scores, row, low, high, maxima, sums, acc, width):
    """Fold scores[row, low:high] into the running maximum and sum; scores become probabilities."""
    top = scores[row, low]
    for j in range(low + 1, high):
        top = max(top, scores[row, j])
    if top > maxima[row]:
        shrinkage = exp_float32(maxima[row] - top)
        if maxima[row] == np.float32(-np.inf):
            shrinkage = np.float32(0.0)
        maxima[row] = top
        sums[row] *= shrinkage
        for i in range(width):
            acc[row, i] *= shrinkage
    top = maxima[row]
    for j in range(low, high):
        scores[row, j] = exp_float32(scores[row, j] - top)
    total = sums[row]
    for j in range(low, high):
        total += scores[row, j]
    sums[row] = total


@compiled
def _attend(queries, first_visible, group, window, table, head, k_memory, v_memory, scores, maxima, sums, acc):
    """One task. queries: [rows, D], scaled; the rows of token i (group of them) see keys below
    first_visible + i. acc, sums, maxima: [rows, ...] scratch; on return acc / sums is the result."""
    num_rows, width = queries.shape
    block_size = v_memory.shape[2]
    num_tokens = num_rows // group
    acc[:num_rows] = np.float32(0.0)
    sums[:num_rows] = np.float32(0.0)
    maxima[:num_rows] = np.float32(-np.inf)
    low_key = 0
    if window > 0:
        low_key = max(0, first_visible - window) // _KEYS * _KEYS
    for base in range(low_key, first_visible + num_tokens - 1, _KEYS):
        block, offset = table[base // block_size], base % block_size
        k = k_memory.ctypes.data + ((block * k_memory.shape[1] + head) * width * block_size + offset) * 4
        v = v_memory.ctypes.data + ((block * v_memory.shape[1] + head) * block_size + offset) * width * 4
        # Tokens from `whole_from` to `whole_to` see the group whole; of the others, some see a part.
        whole_from = min(max(base + _KEYS - first_visible, 0), num_tokens)
        whole_to = num_tokens
        if window > 0:
            whole_to = min(max(base + window - first_visible + 1, whole_from), num_tokens)
        token = 0
        while token < num_tokens:
            if whole_from <= token < whole_to:
                count, low, high = whole_to - token, 0, _KEYS
            else:
                visible = first_visible + token
                count, low, high = 1, 0, min(visible - base, _KEYS)
                if window > 0:
                    low = max(visible - window - base, 0)
            if high > low:
                row, rows = token * group, count * group
                at_q, at_s = queries.ctypes.data + row * width * 4, scores.ctypes.data + row * _KEYS * 4
                multiply_columns(at_q, k, block_size, 0, 1, width, at_s, False, rows, width, _KEYS)
                for r in range(row, row + rows):
                    _update(scores, r, low, high, maxima, sums, acc, width)
                multiply_columns(
                    at_s + low * 4, v + low * width * 4, width, 16, width // 16, high - low,
                    acc.ctypes.data + row * width * 4, True, rows, _KEYS, width,
                )  # fmt: skip
            token += count


@compiled
def paged_attention(
    team, phase, q, head_dim, scale, window, tasks, query_starts, seq_lens, block_tables, k_memory, v_memory, out
):  # fmt: skip
    """out[t, head] = softmax(scale * q k^T) v over the visible keys; see `reference.paged_attention`. One phase.

    q: [T, >= heads * head_dim] float32. window: 0 for none. tasks: [J, 2] int64 (sequence, first query),
    see `attention_tasks`. k_memory, v_memory: see the module. out: [T, heads * head_dim], in place.
    """
    num_kv_heads, width = v_memory.shape[1], v_memory.shape[3]
    group = out.shape[1] // head_dim // num_kv_heads
    most = min(_TILE_TOKENS, out.shape[0]) * group
    all_queries = np.zeros((most, width), np.float32)
    scores, acc = np.empty((most, _KEYS), np.float32), np.empty((most, width), np.float32)
    maxima, sums = np.empty(most, np.float32), np.empty(most, np.float32)
    num_pieces, done = tasks.shape[0] * num_kv_heads, 0
    job = take(team, phase)
    while job < num_pieces:
        head = job % num_kv_heads
        b, first = tasks[job // num_kv_heads, 0], tasks[job // num_kv_heads, 1]
        start, end = query_starts[b] + first, min(query_starts[b] + first + _TILE_TOKENS, query_starts[b + 1])
        queries = all_queries[: (end - start) * group]
        for t in range(start, end):
            for g in range(group):
                column = (head * group + g) * head_dim
                for i in range(head_dim):
                    queries[(t - start) * group + g, i] = q[t, column + i] * scale
        first_visible = seq_lens[b] - (query_starts[b + 1] - start) + 1
        _attend(
            queries, first_visible, group, window, block_tables[b], head, k_memory, v_memory, scores, maxima, sums, acc
        )
        for t in range(start, end):
            for g in range(group):
                column, row = (head * group + g) * head_dim, (t - start) * group + g
                for i in range(head_dim):
                    out[t, column + i] = acc[row, i] / sums[row]
        done += 1
        job = take(team, phase)
    return leave(team, phase, num_pieces, done)


def attention_tasks(query_starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """[J, 2] int64 (sequence, first query): pieces of at most `_TILE_TOKENS` queries."""
    pieces = [
        (b, first) for b, count in enumerate(np.diff(query_starts).tolist()) for first in range(0, count, _TILE_TOKENS)
    ]
    return np.array(pieces, np.int64).reshape(-1, 2)
