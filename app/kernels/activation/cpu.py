"""Gated activations on the CPU: act(gate) * up, with gate and up side by side. Each element is computed by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import exp_float32
from app.kernels.machine.vectors import LANES, WORD, constant, exp, fma, load, store


@intrinsic
def _gate_times_up(typingctx: Any, gate: Any, up: Any, count: Any, gelu: Any, out: Any) -> Any:
    """out[i] = act(gate[i]) * up[i] for i < count, a multiple of LANES; addresses of float32.

    act is silu, or if `gelu` (boolean) gelu with the tanh approximation (Hendrycks & Gimpel 2016).
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        gate, up, count, gelu, out = args
        with builder.if_else(gelu) as (is_gelu, is_silu):
            with is_gelu:
                _each(builder, gate, up, count, out, _twice_tanh_argument)
            with is_silu:
                _each(builder, gate, up, count, out, lambda _builder, value: value)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.boolean, types.intp), codegen


def _each(builder: Any, gate: Any, up: Any, count: Any, out: Any, argument: Any) -> None:
    """gate * sigmoid(argument(gate)) * up."""
    with cgutils.for_range(builder, builder.udiv(count, WORD(LANES)), intp=WORD) as loop:
        at = builder.mul(loop.index, WORD(LANES))
        value = load(builder, gate, at)
        negated = builder.fsub(ir.Constant(value.type, [-0.0] * LANES), argument(builder, value))
        share = builder.fdiv(value, builder.fadd(constant(1.0), exp(builder, negated)))
        store(builder, builder.fmul(share, load(builder, up, at)), out, at)


def _twice_tanh_argument(builder: Any, value: Any) -> Any:
    """2 sqrt(2/pi) (x + 0.044715 x³): 0.5 (1 + tanh(z)) is the logistic function of 2 z."""
    cubed = builder.fmul(builder.fmul(value, value), value)
    return builder.fmul(constant(2 * 0.7978845608028654), fma(builder, constant(0.044715), cubed, value))


@jit
def activate(gate_up, up_start, gelu, first, end, out):
    """out[t, i] = act(gate) * up for columns first to end. gate_up: [T, up_start + I], gate first; out: [T, I].

    act is silu, or gelu with the tanh approximation (Hendrycks & Gimpel 2016).
    """
    whole = (end - first) // LANES * LANES
    for t in range(gate_up.shape[0]):
        gate, up, row = gate_up[t, first:end], gate_up[t, up_start + first : up_start + end], out[t, first:end]
        _gate_times_up(gate.ctypes.data, up.ctypes.data, whole, gelu, row.ctypes.data)
        for i in range(whole, end - first):
            z = gate[i]
            if gelu:  # 0.5 * (1 + tanh(z)) is the logistic function of 2 z
                z = np.float32(1.5957691216057308) * (z + np.float32(0.044715) * z * z * z)
            row[i] = gate[i] / (np.float32(1.0) + exp_float32(-z)) * up[i]


@jit
def activate_clamped(gate_up, up_start, limit, alpha, first, end, out):
    """out[t, i] = (up + 1) * gate * logistic(alpha * gate), gate at most `limit` and up at most that either way.

    The rest as in `activate`; both numbers float32. OpenAI's gpt-oss.
    """
    for t in range(gate_up.shape[0]):
        for i in range(first, end):
            gate = min(gate_up[t, i], limit)
            up = max(min(gate_up[t, up_start + i], limit), -limit)
            out[t, i] = (up + np.float32(1.0)) * gate / (np.float32(1.0) + exp_float32(-alpha * gate))
