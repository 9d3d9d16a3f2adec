"""Gated activations on the CPU.

In: gate and up side by side. Out: act(gate) * up. Every element alone; its bits depend on nothing else.
"""

from __future__ import annotations

import numpy as np

from app.kernels.activation.gating import gate_times_up
from app.kernels.machine.compiled import compiled
from app.kernels.machine.scalars import exp_float32
from app.kernels.machine.vectors import LANES


@compiled
def activate(gate_up, up_start, gelu, first, end, out):
    """out[t, i] = act(gate) * up for columns first to end. gate_up: [T, up_start + I], gate first; out: [T, I].

    act is silu, or gelu with the tanh approximation (Hendrycks & Gimpel 2016).
    """
    whole = (end - first) // LANES * LANES
    for t in range(gate_up.shape[0]):
        gate, up, row = gate_up[t, first:end], gate_up[t, up_start + first : up_start + end], out[t, first:end]
        gate_times_up(gate.ctypes.data, up.ctypes.data, whole, gelu, row.ctypes.data)
        for i in range(whole, end - first):
            z = gate[i]
            if gelu:  # 0.5 * (1 + tanh(z)) is the logistic function of 2 z
                z = np.float32(1.5957691216057308) * (z + np.float32(0.044715) * z * z * z)
            row[i] = gate[i] / (np.float32(1.0) + exp_float32(-z)) * up[i]


@compiled
def activate_clamped(gate_up, up_start, limit, alpha, first, end, out):
    """out[t, i] = (up + 1) * gate * logistic(alpha * gate), gate at most `limit` and up at most that either way.

    The rest as in `activate`; both numbers float32. OpenAI's gpt-oss.
    """
    for t in range(gate_up.shape[0]):
        for i in range(first, end):
            gate = min(gate_up[t, i], limit)
            up = max(min(gate_up[t, up_start + i], limit), -limit)
            out[t, i] = (up + np.float32(1.0)) * gate / (np.float32(1.0) + exp_float32(-alpha * gate))
