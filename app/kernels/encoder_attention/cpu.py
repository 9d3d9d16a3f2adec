"""Bidirectional attention on the CPU: batch-invariant, over whole sequences, without a cache.

One piece of work is a sequence and a head: its keys and values are packed once, then queries come in tiles. Keys come
in groups of `KEYS` in order, with an online softmax (Milakov & Gimelshein 2018) as in `paged_attention`, so a row's
bits depend on its own sequence alone. Missing keys of the last group count as exactly nothing.
"""

from __future__ import annotations

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, finish_phase
from app.kernels.matmul.cpu import PANEL, multiply_columns
from app.kernels.paged_attention.softmax import KEYS, softmax_step

#: Queries of one tile.
_TILE = 32


@jit
def bidirectional_attention(team, phase, qkv, q_size, kv_size, head_dim, scale, query_starts, longest, out):
    """out[t, head] = softmax(scale * q k^T) v over t's sequence; see `reference.bidirectional_attention`. One phase.

    qkv: [T, q_size + 2 * kv_size] float32, q first. query_starts: [B+1] int32; longest: tokens of the longest sequence.
    out: [T, heads * head_dim], in place.
    """
    num_heads = out.shape[1] // head_dim
    width = (head_dim + PANEL - 1) // PANEL * PANEL
    most = (longest + KEYS - 1) // KEYS * KEYS
    keys, values = np.zeros((most // PANEL, width, PANEL), np.float32), np.zeros((most, width), np.float32)
    queries, acc = np.zeros((_TILE, width), np.float32), np.empty((_TILE, width), np.float32)
    scores = np.empty((_TILE, KEYS), np.float32)
    maxima, sums = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    num_pieces, done = (query_starts.shape[0] - 1) * num_heads, 0
    job = claim_piece(team, phase)
    while job < num_pieces:
        b = job // num_heads
        column = (job - b * num_heads) * head_dim
        start, end = query_starts[b], query_starts[b + 1]
        _pack(qkv, start, end, q_size + column, q_size + kv_size + column, head_dim, keys, values)
        for first in range(start, end, _TILE):
            last = min(first + _TILE, end)
            for t in range(first, last):
                for i in range(head_dim):
                    queries[t - first, i] = qkv[t, column + i] * scale
            _attend(queries, last - first, end - start, keys, values, scores, maxima, sums, acc)
            for t in range(first, last):
                for i in range(head_dim):
                    out[t, column + i] = acc[t - first, i] / sums[t - first]
        done += 1
        job = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def _pack(qkv, start, end, k_column, v_column, head_dim, keys, values):
    """A sequence's keys as panels of 16 keys [., D, 16], and its values as rows [., D]; zeros to the group's end."""
    count = end - start
    for j in range(count):
        panel, lane = j // PANEL, j % PANEL
        for i in range(head_dim):
            keys[panel, i, lane] = qkv[start + j, k_column + i]
            values[j, i] = qkv[start + j, v_column + i]
    for j in range(count, (count + KEYS - 1) // KEYS * KEYS):
        panel, lane = j // PANEL, j % PANEL
        for i in range(head_dim):
            keys[panel, i, lane] = np.float32(0.0)
            values[j, i] = np.float32(0.0)


@jit
def _attend(queries, num_rows, num_keys, keys, values, scores, maxima, sums, acc):
    """One tile of scaled queries [rows, D] over packed keys and values; on return acc / sums is the result."""
    width = queries.shape[1]
    acc[:num_rows] = np.float32(0.0)
    sums[:num_rows] = np.float32(0.0)
    maxima[:num_rows] = np.float32(-np.inf)
    for base in range(0, num_keys, KEYS):
        count = min(num_keys - base, KEYS)
        multiply_columns(
            queries.ctypes.data, keys.ctypes.data + base * width * 4, PANEL, width * PANEL,
            (count + PANEL - 1) // PANEL, width, scores.ctypes.data, False, num_rows, width, KEYS,
        )  # fmt: skip
        for row in range(num_rows):
            softmax_step(
                scores.ctypes.data + row * KEYS * 4, 0, count, maxima.ctypes.data + row * 4, sums.ctypes.data + row * 4,
                acc.ctypes.data + row * width * 4, width,
            )  # fmt: skip
        multiply_columns(
            scores.ctypes.data, values.ctypes.data + base * width * 4, width, PANEL, width // PANEL, count,
            acc.ctypes.data, True, num_rows, KEYS, width,
        )  # fmt: skip
