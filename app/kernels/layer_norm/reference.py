"""The definition: out[t] = (x[t] - mean) / sqrt(variance + eps) * weight + bias, one row at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def layer_norm(
    x: NDArray[np.floating], weight: NDArray[np.floating], bias: NDArray[np.floating], eps: float
) -> NDArray[np.float64]:
    """x: [T, H]; weight, bias: [H]. Returns [T, H] float64 (Ba, Kiros & Hinton 2016)."""
    out = np.empty(x.shape, np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        centred = row - row.mean()
        out[t] = centred / math.sqrt(float(centred @ centred) / len(row) + eps) * weight + bias
    return out
