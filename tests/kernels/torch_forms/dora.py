"""DoRA's scale in plain torch, its sums in one order (`fixed_order`)."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.torch_forms.fixed_order import folded_sum, product

#: Rows of W + BA that exist at once.
_ROWS = 1024


def dora_scale(magnitude: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `app.kernels.dora.torch.dora_scale`."""
    squares = torch.empty(len(magnitude), dtype=torch.float64, device=weight.device)
    wide_a, wide_b = a.double(), b.double()
    for first in range(0, len(magnitude), _ROWS):
        rows = weight[first : first + _ROWS].double() + product(wide_b[:, first : first + _ROWS].T, wide_a.T)
        squares[first : first + _ROWS] = folded_sum((rows * rows).T.contiguous())
    return torch.where(squares > 0, magnitude.double() * torch.rsqrt(squares), 0.0).float()
