"""Scalar arithmetic that Numba lacks or computes differently from `vectors`, which has the same exponential in lanes.

A result's bits depend on its argument only.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from app.kernels.machine.jit import jit
from app.kernels.machine.vectors import EXP_MAX, EXP_MIN, EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2E


@intrinsic
def float_from_bits(typingctx, bits):
    """Reinterpret an int32 as float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def bits_from_float(typingctx, value):
    """Reinterpret a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@jit
def exp_float32(x):
    """e**x, float32, within 2 ulp; a polynomial without branches or tables, so that loops over it vectorise.

    Range reduction and coefficients: Cephes expf (Moshier 1989). Below -87.3 the result is about 1e-38.
    """
    x = min(max(x, EXP_MIN), EXP_MAX)
    n = math.floor(x * LOG2E + np.float32(0.5))
    r = x - np.float32(n) * LN2_HIGH - np.float32(n) * LN2_LOW
    p = EXP_TERMS[0]
    p = p * r + EXP_TERMS[1]
    p = p * r + EXP_TERMS[2]
    p = p * r + EXP_TERMS[3]
    p = p * r + EXP_TERMS[4]
    p = p * r + EXP_TERMS[5]
    p = p * r * r + r + np.float32(1.0)
    return p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
