"""From the hidden states of a text to its embedding: which rows count, and what their sum becomes.

In: a sequence and how many of its tokens a step computes; then the sums that the backend made. Out: rows to add; the
embedding. Rule: rows are added in their order, on top of what earlier steps of the sequence added, so chunks change no
bit; and the length of a vector is an exact sum, rounded once. Arithmetic on rows is the backend's.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.models.spec import Pooling
from app.engine.request import PoolingParams


def pooled_range(method: Pooling, num_tokens: int, start: int, end: int) -> tuple[int, int]:
    """Which of tokens `start` to `end` of a sequence of `num_tokens` count: first and end, equal for none."""
    match method:
        case "mean":
            return start, end
        case "last":
            return max(start, num_tokens - 1), max(end, num_tokens - 1)
        case "cls":
            return start, max(start, min(end, 1))


def embedding(sums: NDArray[np.float64], num_tokens: int, params: PoolingParams) -> bytes | None:
    """The embedding of a text of `num_tokens`, as little-endian float32, from the sums [H] over its pooled rows.

    None if one of its numbers is not finite. A vector of zeros, which has no direction, stays as it is.
    """
    kept = sums[: params.num_dimensions] / (num_tokens if params.method == "mean" else 1)
    if not np.isfinite(kept).all():
        return None
    length = math.sqrt(math.fsum((kept * kept).tolist()))
    return (kept / length if length > 0 else kept).astype("<f4").tobytes()
