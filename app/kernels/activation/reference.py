"""The definition: act(gate) * up, element by element; act is silu, or gelu with the tanh approximation."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Activation = Literal["silu", "gelu_tanh"]


def activation_of(x: float, activation: Activation) -> float:
    """silu: x / (1 + e^-x). gelu_tanh: x / 2 (1 + tanh(sqrt(2 / π) (x + 0.044715 x³))) (Hendrycks & Gimpel 2016)."""
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1.0 + math.exp(-x)) if x > 0 else x * math.exp(x) / (1.0 + math.exp(x))  # without overflow


def gated_activation(gate_up: NDArray[np.floating], activation: Activation) -> NDArray[np.float64]:
    """gate_up: [T, 2 I], gate first. Returns [T, I] float64 (Shazeer 2020)."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    out = np.empty_like(gate)
    for t, i in np.ndindex(gate.shape):
        out[t, i] = activation_of(float(gate[t, i]), activation) * up[t, i]
    return out


def clamped_gated_activation(gate_up: NDArray[np.floating], limit: float, alpha: float) -> NDArray[np.float64]:
    """(up + 1) * gate * logistic(alpha * gate), gate clamped from above and up on both sides (OpenAI's gpt-oss).

    gate_up: [T, 2 I], gate first. Returns [T, I] float64.
    """
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1.0) * gate / (1.0 + np.exp(-alpha * gate))
