"""RMS norm on the CPU. Each row is summed by itself in eight fixed lanes, so its bits depend on its contents only."""

from __future__ import annotations

import math

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece

#: Rows that one thread takes at a time.
NORM_ROWS = 4


@jit
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


@jit
def rms_norm(team, phase, x, weight, eps, out):
    """out[t] = rms_norm(x[t]) * weight. x, out: [T, H] float32 (out in place); weight: [H]; eps float32. One phase."""
    num_pieces, done = count_pieces(x.shape[0], NORM_ROWS), 0
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, x.shape[0], NORM_ROWS)
        for t in range(first, end):
            normalise_row(x[t], weight, eps, weight.shape[0], out[t])
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def normalise_and_add(team, phase, x, weight, eps, out):
    """out[t] += rms_norm(x[t]) * weight. x: [T, >= H] float32, overwritten; weight: [H]; out: [T, >= H]. One phase."""
    num_pieces, done = count_pieces(x.shape[0], NORM_ROWS), 0
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, x.shape[0], NORM_ROWS)
        for t in range(first, end):
            normalise_row(x[t], weight, eps, weight.shape[0], x[t])
            for i in range(weight.shape[0]):
                out[t, i] += x[t, i]
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def gather_normed(team, phase, x, rows, weight, eps, out):
    """out[p] = rms_norm(x[rows[p]]) * weight. One phase."""
    num_rows, done = rows.shape[0], 0
    p = claim_piece(team, phase)
    while p < num_rows:
        normalise_row(x[rows[p]], weight, eps, weight.shape[0], out[p])
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, num_rows, done)
