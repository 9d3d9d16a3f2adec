"""Sums of row ranges on the CPU, in float64.

Rows are added one by one, in order, to the previous sum, so a sum has the same bits in one call and in several.
"""

from __future__ import annotations

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, finish_phase


@jit
def add_rows(team, phase, x, ranges, sums):
    """sums[q] += x[first] + ... + x[end - 1], in place. x: [N, H] float32; ranges: [Q, 2] int64; sums: [Q, H] float64.

    One phase.
    """
    num_ranges, done = ranges.shape[0], 0
    q = claim_piece(team, phase)
    while q < num_ranges:
        for row in range(ranges[q, 0], ranges[q, 1]):
            for i in range(sums.shape[1]):
                sums[q, i] += x[row, i]
        done += 1
        q = claim_piece(team, phase)
    return finish_phase(team, phase, num_ranges, done)
