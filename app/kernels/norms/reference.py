"""The definition: out[t] = weight * x[t] / sqrt(mean(x[t]²) + eps), one row at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def rms_norm(x: NDArray[np.floating], weight: NDArray[np.floating], eps: float) -> NDArray[np.float64]:
    """x: [..., H], weight: [H]. Returns x's shape in float64 (Zhang & Sennrich 2019)."""
    rows = x.astype(np.float64).reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    for t, row in enumerate(rows):
        out[t] = weight * row / math.sqrt(float(row @ row) / len(row) + eps)
    return out.reshape(x.shape)
