"""DoRA's scale from packed weights, without forming W + BA.

‖w + Aᵀb‖² = ‖w‖² + 2 b·(A w) + bᵀ(A Aᵀ)b for each row w of W and its column b of B: one pass over W. A w is a float32
product in the order of `app.kernels.machine.simd`, the sums of squares are float64, and all orders are fixed, so every
replica computes the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import ThreadTeam, claim_piece, finish_phase
from app.kernels.matmul.cpu import PANEL, multiply_columns


def dora_scale(
    team: ThreadTeam,
    magnitude: NDArray[np.float32],
    panels: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
) -> NDArray[np.float32]:
    """`app.kernels.dora.reference.dora_scale` for a packed weight: panels `[P, d_in, 16]`."""
    padded = np.zeros((len(b), len(panels) * PANEL))
    padded[:, : len(magnitude)] = b
    columns = np.ascontiguousarray(padded.reshape(len(b), len(panels), PANEL).transpose(1, 0, 2))  # [P, r, 16]
    rows = np.array(a, np.float32, order="C")  # a copy: one kind of array, whether or not `a` is writable
    squares = np.empty((len(panels), PANEL))
    team.run(_row_squares, 1, panels, rows, _gram(rows), columns, squares)
    norms = np.sqrt(squares.reshape(-1)[: len(magnitude)])
    scale: NDArray[np.float64] = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
    return scale.astype(np.float32)


@jit
def _gram(rows):
    """A Aᵀ [r, r] float64 from A [r, d_in]."""
    rank = rows.shape[0]
    gram = np.zeros((rank, rank))
    for i in range(rank):
        for j in range(i + 1):
            for k in range(rows.shape[1]):
                gram[i, j] += np.float64(rows[i, k]) * rows[j, k]
            gram[j, i] = gram[i, j]
    return gram


@jit
def _row_squares(team, phase, panels, rows, gram, columns, squares):
    """squares[p, c] = ‖w + Aᵀb‖² for row 16 p + c of W. columns: [P, r, 16] float64, b. One phase."""
    num_panels, done = panels.shape[0], 0
    rank, depth = rows.shape
    cross, inner = np.empty((rank, PANEL), np.float32), np.empty(PANEL)  # A w, one row of A Aᵀ b
    p = claim_piece(team, phase)
    while p < num_panels:
        multiply_columns(
            rows.ctypes.data, panels.ctypes.data + p * depth * PANEL * 4, PANEL, 0, 1, depth, cross.ctypes.data, False,
            rank, depth, PANEL,
        )  # fmt: skip
        own = np.zeros(PANEL)
        for k in range(depth):
            for c in range(PANEL):
                own[c] += np.float64(panels[p, k, c]) * panels[p, k, c]
        for i in range(rank):
            inner[:] = 0.0
            for j in range(rank):
                for c in range(PANEL):
                    inner[c] += gram[i, j] * columns[p, j, c]
            for c in range(PANEL):
                own[c] += columns[p, i, c] * (2.0 * cross[i, c] + inner[c])
        for c in range(PANEL):
            squares[p, c] = max(own[c], 0.0)
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, num_panels, done)
