"""The definition: what an adapter makes of one row beside its low-rank deltas, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def own_module(
    y: Floats, x: Floats, weight: Floats | None, scale: Floats | None, shift: Floats | None
) -> NDArray[np.float64]:
    """scale * y + shift [d_out], with y = weight [d_out, d_in] @ x [d_in] where there is an own weight."""
    out = y.astype(np.float64) if weight is None else weight.astype(np.float64) @ x.astype(np.float64)
    out = out if scale is None else out * scale
    return out if shift is None else out + shift


def own_logits(
    y: Floats,
    x: Floats,
    weight: Floats | None,
    token_ids: Sequence[int],
    rows: Floats,
    a: Floats,
    b: Floats,
) -> NDArray[np.float64]:
    """Logits [V] of a sampled row x [H]: weight [V, H], else y; rows [n, H] for token_ids; plus b.T @ (a @ x).

    a: [r, H]; b: [r, V].
    """
    out = own_module(y, x, weight, None, None)
    out[list(token_ids)] = rows.astype(np.float64) @ x.astype(np.float64)
    return out + b.astype(np.float64).T @ (a.astype(np.float64) @ x.astype(np.float64))
