"""The definition: one row with its adapter's extra weights, in float64.

A norm is the base's with the adapter's weight in place of its own (`app.kernels.norms`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def module(
    y: Floats, x: Floats, weight: Floats | None, scale: Floats | None, shift: Floats | None
) -> NDArray[np.float64]:
    """scale * y + shift [d_out], with y = weight [d_out, d_in] @ x [d_in] where there is a weight.

    Where a product is added to a residual, the residual is added to the result: it is not scaled.
    """
    out = y.astype(np.float64) if weight is None else weight.astype(np.float64) @ x.astype(np.float64)
    out = out if scale is None else out * scale
    return out if shift is None else out + shift


def embedding(
    y: Floats, token_id: int, token_ids: Sequence[int] | None, rows: Floats, a: Floats, b: Floats
) -> NDArray[np.float64]:
    """The embedding [H] of a token: y, or its row of rows [n, H]; plus b.T @ a[token_id], a: [V, r], b: [r, H].

    token_ids: the tokens that have rows; None: all of them.
    """
    out = y.astype(np.float64)
    if token_ids is None:
        out = rows[token_id].astype(np.float64)
    elif token_id in token_ids:
        out = rows[list(token_ids).index(token_id)].astype(np.float64)
    out += a[token_id].astype(np.float64) @ b.astype(np.float64)
    return out


def logits(
    y: Floats, x: Floats, weight: Floats | None, token_ids: Sequence[int], rows: Floats, a: Floats, b: Floats
) -> NDArray[np.float64]:
    """Logits [V] of a sampled row x [H]: weight [V, H], else y; rows [n, H] for token_ids; plus b.T @ (a @ x).

    a: [r, H]; b: [r, V].
    """
    out = module(y, x, weight, None, None)
    out[list(token_ids)] = rows.astype(np.float64) @ x.astype(np.float64)
    return out + b.astype(np.float64).T @ (a.astype(np.float64) @ x.astype(np.float64))
