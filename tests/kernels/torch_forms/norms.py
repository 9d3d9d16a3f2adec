"""RMS norm in plain torch.

In and out: the tensors that the form of `triton.py` takes. Arithmetic is float32 whatever the tensors hold. A row's
bits depend on that row alone, on every machine (`fixed_order`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.torch_forms.fixed_order import folded_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
    """out = x / rms(x) * weight (Zhang & Sennrich 2019).

    With a residual: residual += x first, and its norm is taken.
    """
    if residual is not None:
        residual += x
        x = residual
    out.copy_(normalised(x, weight, eps))


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, float32; x: [..., H], weight: [H]."""
    x = x.float()
    squares = (x * x).movedim(-1, 0).contiguous()
    # `rsqrt` is a square root and a division on a CPU; `sqrt` would be a library's.
    return x * torch.rsqrt(folded_sum(squares) / x.shape[-1] + eps)[..., None] * weight.float()
