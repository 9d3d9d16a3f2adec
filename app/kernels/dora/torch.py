"""DoRA's scale from a weight on a device, a few rows of W + BA at a time.

In: a magnitude, the weight it scales and its delta. Out: one factor per row of the weight. A GPU's library gives the
same bits for the same shapes every time; on a CPU, where a library does not promise that, sums have one fixed order
(`app.kernels.machine.torch_order`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.machine.torch_order import folded_sum, product

#: Rows of W + BA that exist at once.
_ROWS = 1024


def dora_scale(magnitude: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `reference.dora_scale`.

    magnitude [d_out], weight [d_out, d_in], a [r, d_in], b [r, d_out] -> [d_out] float32.
    """
    squares = torch.empty(len(magnitude), dtype=torch.float64, device=weight.device)
    wide_a, wide_b = a.double(), b.double()
    for first in range(0, len(magnitude), _ROWS):
        part = wide_b[:, first : first + _ROWS].T  # [rows, r]
        delta = part @ wide_a if weight.is_cuda else product(part, wide_a.T)
        rows = weight[first : first + _ROWS].double() + delta
        squares[first : first + _ROWS] = folded_sum((rows * rows).T.contiguous())
    return torch.where(squares > 0, magnitude.double() * torch.rsqrt(squares), 0.0).float()
