"""Rows times a number, and soft caps, on the CPU. Each element is computed by itself."""

from __future__ import annotations

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import exp_float32
from app.kernels.machine.thread_team import claim_piece, finish_phase


@jit
def cap_value(x, cap):
    """cap * tanh(x / cap), float32: (e - 1) / (e + 1) with e = exp(2 x / cap).

    Infinite and NaN inputs become NaN: a cap must not hide that a sum overflowed.
    """
    e = exp_float32(np.float32(2.0) * x / cap)
    return cap * ((e - np.float32(1.0)) / (e + np.float32(1.0))) + (x - x)


@jit
def cap_rows(team, phase, cap, x):
    """x [P, N] float32 capped in place, a row at a time. One phase."""
    num_rows, done = x.shape[0], 0
    p = claim_piece(team, phase)
    while p < num_rows:
        for i in range(x.shape[1]):
            x[p, i] = cap_value(x[p, i], cap)
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, num_rows, done)


@jit
def scale_rows(team, phase, factor, x):
    """x [T, N] float32 times `factor` in place, a row at a time. One phase."""
    num_rows, done = x.shape[0], 0
    t = claim_piece(team, phase)
    while t < num_rows:
        for i in range(x.shape[1]):
            x[t, i] *= factor
        done += 1
        t = claim_piece(team, phase)
    return finish_phase(team, phase, num_rows, done)
