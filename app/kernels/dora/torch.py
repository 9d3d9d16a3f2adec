"""DoRA's scale from a weight on a GPU, a few rows of W + BA at a time; the same bits for the same shapes every time."""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of W + BA that exist at once.
_ROWS = 1024


def dora_scale(magnitude: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """See `reference.dora_scale`.

    magnitude [d_out], weight [d_out, d_in], a [r, d_in], b [r, d_out] -> [d_out] float32.
    """
    squares = torch.empty(len(magnitude), dtype=torch.float64, device=weight.device)
    wide_a, wide_b = a.double(), b.double()
    for first in range(0, len(magnitude), _ROWS):
        rows = weight[first : first + _ROWS].double() + wide_b[:, first : first + _ROWS].T @ wide_a
        squares[first : first + _ROWS] = rows.square().sum(1)
    return torch.where(squares > 0, magnitude.double() * torch.rsqrt(squares), 0.0).float()
