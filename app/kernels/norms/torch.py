"""RMS norm in plain torch.

Arithmetic is float32 whatever the tensors hold. The signature of `rms_norm` is that of `triton.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
