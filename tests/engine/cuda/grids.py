"""Weights as checkpoints have them that were quantised in groups of 32: on grids, each group its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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


def put_on_grids(model: Any) -> Any:
    """A transformers model's embeddings on grids of 8 bits, its linear weights on grids of 4; in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                bits = 8 if "embed" in name or "lm_head" in name else 4
                parameter.copy_(torch.from_numpy(on_grids(parameter.numpy(), bits)))
    return model
