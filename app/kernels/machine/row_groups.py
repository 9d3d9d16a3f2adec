"""Rows that are rounded for a product, group by group along the sum: each kind of rounded rows defines one group."""

from __future__ import annotations

import numpy as np

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import claim_piece, finish_phase

#: Values that a thread rounds at a time: some microseconds.
_VALUES_PER_PIECE = 4096


def round_group(rows, x, place):
    """Round 32 float32 at address x into group number `place` of `rows`. Defined by `overload` for each kind of rows.

    Of a product with T rows, group g of row t is number g * T + t: all rows' groups lie side by side.
    """
    raise NotImplementedError("called from compiled code only")


@jit
def _round_row(x, t, num_rows, rows):
    """rows = the groups of x, float32 [K], row t of num_rows; zeros behind the last value."""
    depth = x.shape[0]
    padded = np.empty(GROUP, np.float32)
    for group in range(-(-depth // GROUP)):
        first = group * GROUP
        at = x.ctypes.data + first * 4
        if first + GROUP > depth:
            for i in range(GROUP):
                padded[i] = x[first + i] if first + i < depth else np.float32(0.0)
            at = padded.ctypes.data
        round_group(rows, at, group * num_rows + t)


@jit
def round_rows(team, phase, x, rows):
    """rows = the rounded x [T, K], float32 with contiguous rows. One phase."""
    (num_rows, depth), done = x.shape, 0
    size = max(_VALUES_PER_PIECE // max(depth, 1), 1)
    num_pieces = -(-num_rows // size)
    index = claim_piece(team, phase)
    while index < num_pieces:
        for t in range(index * size, min((index + 1) * size, num_rows)):
            _round_row(x[t], t, num_rows, rows)
        done += 1
        index = claim_piece(team, phase)
    return finish_phase(team, phase, num_pieces, done)
