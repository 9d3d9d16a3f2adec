"""Gated activations in plain torch.

In and out: the tensors that the form of `triton.py` takes. Exponentials are `fixed_order`'s:
torch's own depend on where in an array they stand.
"""

from __future__ import annotations

import math

from torch import Tensor

from tests.kernels.torch_forms.fixed_order import exponential


def gated_activation(
    gate_up: Tensor, out: Tensor, activation: str, limit: float | None = None, alpha: float = 1.0
) -> None:
    """out [T, I] = act(gate) * up of gate_up [T, 2 I]; "silu", or "gelu_tanh" (Hendrycks & Gimpel 2016).

    With a limit: (up + 1) * gate * logistic(alpha * gate), clamped (`reference.clamped_gated_activation`).
    """
    gate, up = gate_up.float().chunk(2, 1)
    if limit is not None:
        wide = gate.clamp(max=limit).double()
        out.copy_((wide / (1 + exponential(-(alpha * wide)))).float() * (up.clamp(-limit, limit) + 1.0))
        return
    wide = gate.double()
    # 0.5 (1 + tanh(z)) is the logistic function of 2 z, without the cancellation.
    z = wide if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    out.copy_((wide / (1 + exponential(-z))).float() * up)
