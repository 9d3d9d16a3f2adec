"""DoRA's scale from packed weights, without forming W + BA.

‖w + Aᵀb‖² = ‖w‖² + 2 b·(A w) + bᵀ(A Aᵀ)b for each row w of W and its column b of B: one pass over W. Sums are
float64 and their order is fixed, so a replica computes the bits that every other one does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import PANEL
from app.kernels.team import Team, leave, take


def dora_scale(
    team: Team,
    magnitude: NDArray[np.float32],
    panels: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
) -> NDArray[np.float32]:
    """As `app.kernels.dora.reference.dora_scale`, with the weight packed: panels `[P, d_in, 16]`."""
    padded = np.zeros((len(b), len(panels) * PANEL))
    padded[:, : len(magnitude)] = b
    columns = np.ascontiguousarray(padded.reshape(len(b), len(panels), PANEL).transpose(1, 0, 2))  # [P, r, 16]
    rows = np.ascontiguousarray(a.T, np.float64)  # [d_in, r]
    squares = np.empty((len(panels), PANEL))
    team.run(_row_squares, 1, panels, rows, _gram(rows), columns, squares)
    norms = np.sqrt(squares.reshape(-1)[: len(magnitude)])
    scale: NDArray[np.float64] = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
    return scale.astype(np.float32)


@compiled
def _gram(rows):
    """A Aᵀ [r, r] from rows [d_in, r]."""
    rank = rows.shape[1]
    gram = np.zeros((rank, rank))
    for k in range(rows.shape[0]):
        for i in range(rank):
            for j in range(rank):
                gram[i, j] += rows[k, i] * rows[k, j]
    return gram


@compiled
def _row_squares(team, phase, panels, rows, gram, columns, squares):
    """squares[p, c] = ‖w + Aᵀb‖² for row 16 p + c of W. columns: [P, r, 16] float64, b. One phase."""
    num_panels, done = panels.shape[0], 0
    depth, rank = rows.shape
    cross, row = np.empty((rank, PANEL)), np.empty(PANEL)  # A w, w
    p = take(team, phase)
    while p < num_panels:
        own = np.zeros(PANEL)
        cross[:] = 0.0
        for k in range(depth):
            for c in range(PANEL):
                row[c] = panels[p, k, c]
                own[c] += row[c] * row[c]
            for i in range(rank):
                value = rows[k, i]
                for c in range(PANEL):
                    cross[i, c] += value * row[c]
        for c in range(PANEL):
            total = own[c]
            for i in range(rank):
                inner = 0.0
                for j in range(rank):
                    inner += gram[i, j] * columns[p, j, c]
                total += columns[p, i, c] * (2.0 * cross[i, c] + inner)
            squares[p, c] = max(total, 0.0)
        done += 1
        p = take(team, phase)
    return leave(team, phase, num_panels, done)
