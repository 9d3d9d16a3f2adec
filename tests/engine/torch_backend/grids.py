"""Weights as checkpoints have them that were quantised in groups of 32: on grids, each group its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def on_grids(w: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """w [N, K] rounded per group to 2**bits levels, scale and offset in half precision (as Q4_1 for 4 bits)."""
    num_columns, depth = w.shape
    padded = np.pad(w, ((0, 0), (0, -depth % 32)), mode="edge").reshape(num_columns, -1, 32)
    low = padded.min(axis=2, keepdims=True).astype(np.float16).astype(np.float32)
    steps = ((padded.max(axis=2, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    levels = np.rint((padded - low) / np.where(steps > 0, steps, 1)).clip(0, 2**bits - 1)
    rounded = (levels.astype(np.float64) * steps + low).astype(np.float32)
    return np.ascontiguousarray(rounded.reshape(num_columns, -1)[:, :depth])
