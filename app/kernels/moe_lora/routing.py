"""MoE routing on the CPU: each token's experts, its rows sorted by expert, and the weighted sum afterwards.

There are P = T * K pairs of a token and one of its experts. Every sum runs in one fixed order over a token's own
numbers, and the lower expert wins ties, so results are batch-invariant.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import exp_float32
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece

#: Tokens or pairs that one thread takes at a time.
_ROWS = 4


class Pairs(NamedTuple):
    """A step's pairs, rewritten by every layer. T tokens with K experts each, of E.

    experts, topk_weights: [T, K], each token's experts, the largest weight first. order: [T * K], the pairs t * K + k
    sorted by expert, then by token; places: [T * K], each pair's place in that order. starts: [E + 1], each expert's
    first pair in it. busy: [E], the experts that have pairs, those with most first; num_busy[0] counts them.
    """

    experts: NDArray[np.int64]
    topk_weights: NDArray[np.float32]
    order: NDArray[np.int64]
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    busy: NDArray[np.int64]
    num_busy: NDArray[np.int64]


def empty_pairs(num_tokens: int, top_k: int, num_experts: int) -> Pairs:
    """Allocate pairs for `num_tokens` tokens."""
    count = num_tokens * top_k
    return Pairs(
        np.zeros((num_tokens, top_k), np.int64),
        np.zeros((num_tokens, top_k), np.float32),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(num_experts + 1, np.int64),
        np.zeros(num_experts, np.int64),
        np.zeros(1, np.int64),
    )


@jit
def route(team, phase, logits, normalised, scale, num_groups, top_groups, pairs):
    """Each token's experts and their weights: the largest of a softmax over its E logits, divided by their sum if
    `normalised`, times `scale` (float32).

    Only the top_groups of num_groups groups of neighbouring experts with the largest probability are chosen from
    (DeepSeek-AI 2024); the others count as zero. logits: [T, >= E]. pairs: `Pairs`, of whose experts and topk_weights
    the first T rows are written. One phase.
    """
    num_tokens, num_experts, done = logits.shape[0], pairs.busy.shape[0], 0
    num_pieces = count_pieces(num_tokens, _ROWS)
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_tokens, _ROWS)
        probs, taken = np.empty(num_experts, np.float32), np.empty(num_experts, np.bool_)
        for t in range(first, end):
            _softmax(logits[t], probs)
            if top_groups < num_groups:
                _leave_groups(probs, num_groups, top_groups)
            taken[:] = False
            _choose(probs, taken, normalised, pairs.experts[t], pairs.topk_weights[t])
            if scale != np.float32(1.0):
                for k in range(pairs.topk_weights.shape[1]):
                    pairs.topk_weights[t, k] *= scale
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def _softmax(logits, out):
    highest = logits[0]
    for e in range(1, out.shape[0]):
        highest = max(highest, logits[e])
    total = np.float32(0.0)
    for e in range(out.shape[0]):
        out[e] = exp_float32(logits[e] - highest)
        total += out[e]
    for e in range(out.shape[0]):
        out[e] /= total


@jit
def _leave_groups(probs, num_groups, top_groups):
    """Zero the probabilities of all groups but those with the largest single ones; the lower group wins ties."""
    size = probs.shape[0] // num_groups
    left = np.zeros(num_groups, np.bool_)
    for _ in range(top_groups):
        best, most = -1, np.float32(0.0)
        for group in range(num_groups):
            largest = probs[group * size : (group + 1) * size].max()
            if not left[group] and (best < 0 or largest > most):
                best, most = group, largest
        left[best] = True
    for group in range(num_groups):
        if not left[group]:
            probs[group * size : (group + 1) * size] = np.float32(0.0)


@jit
def _choose(probs, taken, normalised, experts, chosen):
    """Fill experts and chosen [K]. NaN probabilities choose experts all the same, the lowest first."""
    total = np.float32(0.0)
    for k in range(experts.shape[0]):
        best = -1
        for e in range(probs.shape[0]):
            if not taken[e] and (best < 0 or probs[e] > probs[best]):
                best = e
        taken[best] = True
        experts[k], chosen[k] = best, probs[best]
        total += probs[best]
    if normalised:
        for k in range(experts.shape[0]):
            chosen[k] /= total


@jit
def sort_pairs(team, phase, num_tokens, pairs):
    """Fill the rest of `pairs` from the experts of the first num_tokens tokens. One phase of one piece."""
    done = 0
    if claim_piece(team, phase) == 0:
        top_k, starts, num_experts = pairs.experts.shape[1], pairs.starts, pairs.busy.shape[0]
        starts[:] = 0
        for t in range(num_tokens):
            for k in range(top_k):
                starts[pairs.experts[t, k] + 1] += 1
        _list_busy(starts, pairs.busy, pairs.num_busy)
        for e in range(num_experts):
            starts[e + 1] += starts[e]
        free = starts.copy()
        for t in range(num_tokens):
            for k in range(top_k):
                expert = pairs.experts[t, k]
                pairs.order[free[expert]] = t * top_k + k
                pairs.places[t * top_k + k] = free[expert]
                free[expert] += 1
        done = 1
    return finish_phase(team, phase, 1, done)


@jit
def _list_busy(counts, busy, num_busy):
    """List experts with pairs, those with most first: threads finish together if the last pieces are small."""
    count = 0
    for e in range(busy.shape[0]):
        if counts[e + 1] > 0:
            at = count
            while at > 0 and counts[busy[at - 1] + 1] < counts[e + 1]:
                busy[at] = busy[at - 1]
                at -= 1
            busy[at] = e
            count += 1
    num_busy[0] = count


@jit
def gather_pairs(team, phase, x, num_tokens, pairs, out):
    """out[i] = x[token of the i-th pair in order]; x: [T, H]; out: [>= T * K, H]. One phase."""
    top_k, done = pairs.experts.shape[1], 0
    num_pairs = num_tokens * top_k
    num_pieces = count_pieces(num_pairs, _ROWS)
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, num_pairs, _ROWS)
        for i in range(first, end):
            out[i, :] = x[pairs.order[i] // top_k]
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)


@jit
def combine(team, phase, outputs, pairs, shared, gates, width, hidden):
    """hidden[t] += Σ_k topk_weights[t, k] * outputs[place of pair t, k] + logistic(gates[t]) * shared[t]. One phase.

    outputs: [>= T * K, W], which serves as scratch. shared: [T, W], or [0, W] where no expert is shared; gates: [T], or
    [0] where all of it is added. hidden: [T, W], of which `width` columns are written.
    """
    num_tokens, top_k, done = hidden.shape[0], pairs.experts.shape[1], 0
    t = claim_piece(team, phase)
    while t < num_tokens:
        total, share = outputs[pairs.places[t * top_k]], pairs.topk_weights[t, 0]
        for i in range(width):
            total[i] *= share
        for k in range(1, top_k):
            _add_times(outputs[pairs.places[t * top_k + k]], pairs.topk_weights[t, k], width, total)
        if shared.shape[0] > 0:
            factor = np.float32(1.0)
            if gates.shape[0] > 0:
                factor = factor / (factor + exp_float32(-gates[t]))
            _add_times(shared[t], factor, width, total)
        _add_times(total, np.float32(1.0), width, hidden[t])
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_tokens, done)


@jit
def _add_times(values, factor, width, out):
    for i in range(width):
        out[i] += factor * values[i]
