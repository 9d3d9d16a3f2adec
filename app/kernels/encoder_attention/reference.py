"""The definition: softmax(scale * q K^T) V over all keys of the query's own sequence, one query at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bidirectional_attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    query_starts: NDArray[np.int32],
    scale: float,
) -> NDArray[np.float64]:
    """q, k, v: [T, heads, D]; query_starts: [B+1]. Returns [T, heads, D] float64 (Vaswani et al. 2017)."""
    out = np.zeros(q.shape, np.float64)
    for first, end in zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True):
        for t in range(first, end):
            for head in range(q.shape[1]):
                scores = scale * (k[first:end, head].astype(np.float64) @ q[t, head].astype(np.float64))
                p = np.exp(scores - scores.max())
                out[t, head] = (p / p.sum()) @ v[first:end, head].astype(np.float64)
    return out
