"""Layer norm on the CPU. Each row is summed by itself in eight fixed lanes, so its bits depend on its contents only."""

from __future__ import annotations

import math

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece

#: Rows that one thread takes at a time.
NORM_ROWS = 4


@jit
def _sum(x, size, lanes):
    """x[0] + ... + x[size - 1] in eight fixed lanes; lanes: [8], overwritten."""
    lanes[:] = np.float32(0.0)
    whole = size // 8 * 8
    for i in range(0, whole, 8):
        for lane in range(8):
            lanes[lane] += x[i + lane]
    for i in range(whole, size):
        lanes[i - whole] += x[i]
    total = np.float32(0.0)
    for lane in range(8):
        total += lanes[lane]
    return total


@jit
def normalise_centred_row(x, weight, bias, eps, lanes, squares, out):
    """out = layer_norm(x) * weight + bias, [H]; lanes: [8] and squares: [H] are scratch. x may be out."""
    size = weight.shape[0]
    mean = _sum(x, size, lanes) / np.float32(size)
    for i in range(size):
        out[i] = x[i] - mean
        squares[i] = out[i] * out[i]
    factor = np.float32(1.0) / np.float32(math.sqrt(_sum(squares, size, lanes) / np.float32(size) + eps))
    for i in range(size):
        out[i] = out[i] * factor * weight[i] + bias[i]


@jit
def layer_norm(team, phase, x, weight, bias, eps, out):
    """x[t] = out[t] = layer_norm(x[t]) * weight + bias.

    x: [T, >= H] float32, in place; out: [T, H]; weight, bias: [H]; eps float32. A post-norm model adds its next product
    to the norm's output, so both are written. One phase.
    """
    size = weight.shape[0]
    lanes, squares = np.empty(8, np.float32), np.empty(size, np.float32)
    num_pieces, done = count_pieces(x.shape[0], NORM_ROWS), 0
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, x.shape[0], NORM_ROWS)
        for t in range(first, end):
            normalise_centred_row(x[t], weight, bias, eps, lanes, squares, out[t])
            for i in range(size):
                x[t, i] = out[t, i]
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def embed_normed(
    team, phase, token_ids, position_ids, word_embeddings, position_embeddings, token_type_embedding, weight, bias, eps,
    hidden, out,
):  # fmt: skip
    """hidden[t] = out[t] = layer_norm(word + token type + position): the input of a BERT (Devlin et al. 2019).

    token_ids, position_ids: [T] int32; word_embeddings: [V, H]; position_embeddings: [P, H]; token_type_embedding: [H],
    the row of the only type there is; hidden: [T, >= H] and out: [T, H], in place. One phase.
    """
    size = weight.shape[0]
    lanes, squares = np.empty(8, np.float32), np.empty(size, np.float32)
    num_pieces, done = count_pieces(token_ids.shape[0], NORM_ROWS), 0
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, token_ids.shape[0], NORM_ROWS)
        for t in range(first, end):
            for i in range(size):
                word = word_embeddings[token_ids[t], i]
                out[t, i] = word + token_type_embedding[i] + position_embeddings[position_ids[t], i]
            normalise_centred_row(out[t], weight, bias, eps, lanes, squares, out[t])
            for i in range(size):
                hidden[t, i] = out[t, i]
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
