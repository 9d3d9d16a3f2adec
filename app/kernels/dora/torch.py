"""DoRA's scale from a weight on a device, a few rows of W + BA at a time."""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of W + BA that exist at once.
_ROWS = 1024


def dora_scale(magnitude: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `reference.dora_scale`.

    magnitude [d_out], weight [d_out, d_in], a [r, d_in], b [r, d_out] -> [d_out] float32.
    """
    norms = torch.empty(len(magnitude), dtype=torch.float64, device=weight.device)
    for first in range(0, len(magnitude), _ROWS):
        rows = weight[first : first + _ROWS].double() + b[:, first : first + _ROWS].T.double() @ a.double()
        norms[first : first + _ROWS] = torch.linalg.vector_norm(rows, dim=1)
    return torch.where(norms > 0, magnitude.double() / norms, 0.0).float()
