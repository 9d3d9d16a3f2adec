"""Gated activations in plain torch.

Arithmetic is float32 whatever the tensors hold. The signature is that of `triton.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gated(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """out [T, I] = act(gate) * up of gate_up [T, 2 I]; "silu", or "gelu_tanh" (Hendrycks & Gimpel 2016)."""
    gate, up = gate_up.float().chunk(2, 1)
    # On a CPU torch ends each thread's part of an array with scalar code, whose exponentials differ from the vectors'
    # in the last bit. In float64 both round to the same float32, wherever the parts end.
    wide = gate.double() if gate.device.type == "cpu" else gate
    # 0.5 (1 + tanh(z)) is the logistic function of 2 z, without the cancellation.
    z = wide if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    act = wide * torch.sigmoid(z)
    out.copy_(act.float() * up)
