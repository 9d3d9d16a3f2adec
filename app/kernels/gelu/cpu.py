"""gelu on the CPU with the exact erf. Each element is computed by itself.

erf is a quotient of two polynomials, without branches or tables, so that loops over it vectorise.
"""

from __future__ import annotations

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, count_pieces, finish_phase, piece

#: Rows that one thread takes at a time.
_ROWS = 4

_BOUND = np.float32(4.0)  # beyond it erf is 1 in float32
_SQRT_HALF = np.float32(0.7071067811865476)
#: Coefficients of x (numerator, odd powers) and of 1 (denominator, even powers), the highest first: Eigen's float erf.
_P6, _P5, _P4, _P3, _P2, _P1, _P0 = (
    np.float32(value)
    for value in (
        -2.72614225801306e-10,
        2.77068142495902e-08,
        -2.10102402082508e-06,
        -5.69250639462346e-05,
        -7.34990630326855e-04,
        -2.95459980854025e-03,
        -1.60960333262415e-02,
    )
)
_Q4, _Q3, _Q2, _Q1, _Q0 = (
    np.float32(value)
    for value in (
        -1.45660718464996e-05,
        -2.13374055278905e-04,
        -1.68282697438203e-03,
        -7.37332916720468e-03,
        -1.42647390514189e-02,
    )
)


@jit
def erf_float32(x):
    """erf(x), float32, within 5e-7 of it."""
    x = min(max(x, -_BOUND), _BOUND)
    z = x * x
    p = _P6
    p = p * z + _P5
    p = p * z + _P4
    p = p * z + _P3
    p = p * z + _P2
    p = p * z + _P1
    p = p * z + _P0
    q = _Q4
    q = q * z + _Q3
    q = q * z + _Q2
    q = q * z + _Q1
    q = q * z + _Q0
    return x * p / q


@jit
def gelu(team, phase, x, out):
    """out[t] = gelu(x[t, :I]) = x / 2 (1 + erf(x / sqrt(2))) (Hendrycks & Gimpel 2016).

    x: [T, >= I] float32; out: [T, I], in place. One phase.
    """
    num_pieces, done = count_pieces(x.shape[0], _ROWS), 0
    index = claim_piece(team, phase)
    while index < num_pieces:
        first, end = piece(index, x.shape[0], _ROWS)
        for t in range(first, end):
            row, to = x[t], out[t]
            for i in range(out.shape[1]):
                to[i] = np.float32(0.5) * row[i] * (np.float32(1.0) + erf_float32(row[i] * _SQRT_HALF))
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
