"""The definition: DoRA's scale of every output (Liu et al. 2024), m / ‖W + BA‖, computed once per adapter.

A module's output without its bias is multiplied by it. A row of W + BA that is zero has no direction:
its scale is 0, as its output is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dora_scale(
    magnitude: NDArray[np.float32], weight: NDArray[np.float32], a: NDArray[np.float32], b: NDArray[np.float32]
) -> NDArray[np.float32]:
    """magnitude `[d_out]`, weight `[d_out, d_in]`, a `[r, d_in]`, b `[r, d_out]` (scale folded in) → `[d_out]`."""
    norms = np.linalg.norm(weight.astype(np.float64) + b.T.astype(np.float64) @ a.astype(np.float64), axis=1)
    scale: NDArray[np.float64] = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
    return scale.astype(np.float32)
