"""DoRA's column scale (Liu et al. 2024): computed once for an adapter on a base, never per token.

In: the magnitude m, the base's weight and the pair. Out: m / ‖W + BA‖ per output row; the module's
output without its bias is multiplied by it. The sum W + BA is never formed: its row norms follow
from W's own and from products of rank r.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraPair


def dora_scale(magnitude: NDArray[np.float32], weight: NDArray[np.float32], pair: LoraPair) -> NDArray[np.float32]:
    """magnitude `[d_out]`, weight `[d_out, d_in]` → scale `[d_out]` float32.

    ‖w + Aᵀb‖² = ‖w‖² + 2 b·(A w) + bᵀ(A Aᵀ)b for each row w of W and its column b of pair.b, in
    float64. A row of W + BA that is zero has no direction: its scale is 0, as its output is.
    """
    a, b = pair.a.astype(np.float64), pair.b.astype(np.float64)  # [r, d_in], [r, d_out]
    own = np.einsum("oi,oi->o", weight, weight, dtype=np.float64)  # [d_out]
    cross = np.einsum("ro,ro->o", b, a @ weight.T.astype(np.float64))
    delta = np.einsum("ro,ro->o", b, (a @ a.T) @ b)
    norms = np.sqrt(np.maximum(own + 2 * cross + delta, 0.0))
    scale: NDArray[np.float64] = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
    return scale.astype(np.float32)
