"""The definition: sums[q] plus the rows of range q, first to last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def add_rows(x: NDArray[np.float32], ranges: NDArray[np.int64], sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """x: [N, H]; ranges: [Q, 2], first and end row of each; sums: [Q, H]. Returns [Q, H] float64."""
    out = sums.copy()
    for q, (first, end) in enumerate(ranges.tolist()):
        for row in range(first, end):
            out[q] += x[row].astype(np.float64)
    return out
