"""The definition: out[i, n] = start[i, n] + sum over k of x[i, k] * w[n, k]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def matmul(
    x: NDArray[np.floating], w: NDArray[np.floating], start: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """x: [M, K], w: [N, K], start: [M, N] or None for zero. Returns [M, N] in float64."""
    out = x.astype(np.float64) @ w.astype(np.float64).T
    return out if start is None else out + start
