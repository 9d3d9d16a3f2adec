"""Sampling of tokens on the CPU, one row of logits at a time with the row's parameters only.

Randomness is a counter: the uniform number of a draw is a hash of (seed, position), so a request draws the same token
alone or in any batch, and again after a restart elsewhere.
"""

from __future__ import annotations

import math

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import exp_float32
from app.kernels.machine.thread_team import claim_piece, finish_phase


@jit
def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014), on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def uniform(seed, position):
    """A float64 in [0, 1) from (seed uint64, position int64)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix(np.uint64(seed) + golden)
    bits = _mix(key ^ _mix(np.uint64(position) + golden + golden))
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@jit
def row_maximum(row):
    """(maximum, its first index); NaN and its first index if there is one, like NumPy's max and argmax."""
    lanes, is_number = np.empty(16, np.float32), np.ones(16, np.bool_)
    lanes[:] = row[0]
    whole = row.shape[0] // 16 * 16
    for i in range(0, whole, 16):
        for lane in range(16):
            value = row[i + lane]
            is_number[lane] &= value == value  # noqa: PLR0124  (false for NaN alone)
            lanes[lane] = max(lanes[lane], value)
    top, are_numbers = lanes[0], is_number[0]
    for lane in range(1, 16):
        top, are_numbers = max(top, lanes[lane]), are_numbers and is_number[lane]
    for i in range(whole, row.shape[0]):
        top, are_numbers = max(top, row[i]), are_numbers and row[i] == row[i]
    for i in range(row.shape[0]):
        if row[i] == top if are_numbers else row[i] != row[i]:
            return row[i], i
    return top, 0


@jit
def log_sum_exp(row, top):
    """log(sum(exp(row))) as float64 in eight fixed lanes; `top`: the row's maximum."""
    lanes = np.zeros(8, np.float64)
    whole = row.shape[0] // 8 * 8
    for i in range(0, whole, 8):
        for lane in range(8):
            lanes[lane] += exp_float32(row[i + lane] - top)
    for i in range(whole, row.shape[0]):
        lanes[0] += exp_float32(row[i] - top)
    total = 0.0
    for lane in range(8):
        total += lanes[lane]
    return np.float64(top) + math.log(total)


@jit
def _cutoff_top_k(p, k):
    """The k-th largest value of p."""
    return np.partition(p, p.shape[0] - k)[p.shape[0] - k]


@jit
def _cutoff_top_p(p, floor, top_p):
    """The smallest value in the smallest set of largest values (of those >= floor) with mass >= top_p.

    Holtzman et al. 2020. Candidates are taken in widening bands below the maximum (1.0), so that
    a peaked distribution sorts a few dozen values, not the vocabulary.
    """
    mass = 0.0
    for i in range(p.shape[0]):
        if p[i] >= floor:
            mass += p[i]
    wanted = top_p * mass
    band = np.float32(0.1)
    while True:
        limit = max(band, floor)
        held, count = 0.0, 0
        for i in range(p.shape[0]):
            if p[i] >= limit:
                held += p[i]
                count += 1
        if held >= wanted or limit == floor or band == np.float32(0.0):
            break
        band = band * np.float32(0.1) if band > np.float32(1e-12) else np.float32(0.0)
    candidates = np.empty(count, np.float32)
    count = 0
    for i in range(p.shape[0]):
        if p[i] >= limit:
            candidates[count] = p[i]
            count += 1
    candidates.sort()
    held = 0.0
    for i in range(count - 1, -1, -1):
        held += candidates[i]
        if held >= wanted:
            return candidates[i]
    return candidates[0]


@jit
def draw(row, temperature, top_k, top_p, min_p, seed, position):
    """One token from a row of logits [V]. temperature > 0. Filters apply in transformers' order:
    temperature, top-k, top-p, min-p (Nguyen et al. 2024); values equal to a cut-off stay in."""
    top, _ = row_maximum(row)
    p = np.empty(row.shape[0], np.float32)
    inverse = np.float32(1.0) / temperature
    forbidden, nothing = np.float32(-np.inf), np.float32(0.0)
    for i in range(row.shape[0]):
        value = exp_float32((row[i] - top) * inverse)
        p[i] = nothing if row[i] == forbidden else value  # that exponential is never 0
    floor = np.float32(0.0)
    if 0 < top_k < row.shape[0]:
        floor = _cutoff_top_k(p, top_k)
    if top_p < np.float32(1.0):
        floor = max(floor, _cutoff_top_p(p, floor, top_p))
    floor = max(floor, min_p)
    mass = 0.0
    for i in range(p.shape[0]):
        if p[i] >= floor:
            mass += p[i]
    target = uniform(seed, position) * mass
    held, last = 0.0, 0
    for i in range(p.shape[0]):
        if p[i] >= floor and p[i] > np.float32(0.0):
            held += p[i]
            last = i
            if held > target:
                return i
    return last


@jit
def forbid(row, mask):
    """Set logits [V] to -inf, in place, where the mask's bit is 0. mask: [W] uint32, lowest bit first."""
    for word in range(mask.shape[0]):
        bits, first = mask[word], word * 32
        if bits == np.uint32(0xFFFFFFFF):
            continue
        for bit in range(min(32, row.shape[0] - first)):
            if (bits >> np.uint32(bit)) & np.uint32(1) == np.uint32(0):
                row[first + bit] = np.float32(-np.inf)


@jit
def sample_rows(
    team, phase, logits, temperature, top_k, top_p, min_p, seeds, positions, wants_logprob, mask_of_row, masks, tokens,
    normalisers,
):  # fmt: skip
    """tokens[p] = the token of row p; normalisers[p] = its log-sum-exp where wanted. Both in place. One phase.

    logits: [P, V] float32, overwritten where a row has a mask; masks: [M, W] uint32; the rest [P]. mask_of_row: -1 is
    none. Temperature 0 is greedy, ties to the smallest id. A row whose largest logit is NaN or infinite gets that
    token, so that its logit shows the overflow.
    """
    num_rows, done = logits.shape[0], 0
    p = claim_piece(team, phase)
    while p < num_rows:
        if mask_of_row[p] >= 0:
            forbid(logits[p], masks[mask_of_row[p]])
        top, best = row_maximum(logits[p])
        if wants_logprob[p]:
            normalisers[p] = log_sum_exp(logits[p], top)
        if temperature[p] == np.float32(0.0) or not math.isfinite(top):
            tokens[p] = best
        else:
            tokens[p] = draw(logits[p], temperature[p], top_k[p], top_p[p], min_p[p], seeds[p], positions[p])
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, num_rows, done)
