"""Quantises rows for products in 8-bit integers, as `app.kernels.int8_matmul.reference` defines it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from app.kernels.machine.row_groups import round_group
from app.kernels.machine.simd import GROUP
from app.kernels.machine.vectors import FLOAT, INT, INTS, LANES, VECTOR, WORD, across, load, spread, tree

_MAX_LEVEL, _SMALLEST = np.float32(127), np.float32(1e-30)
#: float32 without its sign; the bits of infinity, above which are NaNs.
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


class QuantisedRows(NamedTuple):
    """Memory for the quantised rows of one product at a time, flat: int8 levels, and float32 scales and sums.

    Of a product with T rows, group g of row t has levels at (g * T + t) * 32, and its scale and sum at g * T + t: all
    rows' groups lie side by side.
    """

    levels: NDArray[np.int8]
    scales: NDArray[np.float32]
    sums: NDArray[np.float32]


def new_rows(num_values: int) -> QuantisedRows:
    """Memory for `num_values` values, a multiple of 32."""
    num_groups = num_values // GROUP
    return QuantisedRows(
        np.zeros(num_values, np.int8), np.zeros(num_groups, np.float32), np.zeros(num_groups, np.float32)
    )


@intrinsic
def _quantise_group(typingctx: Any, x: Any, levels: Any, scale: Any, total: Any) -> Any:
    """Quantise 32 float32 at address x; addresses of int8 [32], float32 and float32 are written."""
    signature = types.void(*([types.intp] * 4))

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, levels, scale_at, total_at = args
        parts = [load(builder, x, WORD(first)) for first in range(0, GROUP, LANES)]
        magnitudes = [builder.and_(builder.bitcast(p, INTS), ir.Constant(INTS, [_MAGNITUDE] * LANES)) for p in parts]
        largest = across(builder, tree(builder, magnitudes, _larger), _larger)  # as integers, NaN is above infinity
        value = builder.bitcast(largest, FLOAT)
        is_finite = builder.icmp_signed("<", largest, INT(_INFINITY))
        is_used = builder.and_(is_finite, builder.fcmp_ordered(">=", value, FLOAT(float(_SMALLEST))))
        safe = builder.select(is_used, value, FLOAT(1.0))
        limit = FLOAT(float(_MAX_LEVEL))
        unused = builder.select(is_finite, FLOAT(0.0), FLOAT(float("nan")))
        scale = builder.select(is_used, builder.fdiv(safe, limit), unused)
        inverse = spread(builder, builder.fdiv(limit, safe))
        used = spread(builder, is_used, ir.VectorType(ir.IntType(1), LANES))
        rounded = []
        for part in parts:
            kept = builder.select(used, part, ir.Constant(VECTOR, [0.0] * LANES))
            rounded.append(builder.fptosi(_round(builder, builder.fmul(kept, inverse)), INTS))
        for index, part in enumerate(rounded):
            small = builder.trunc(part, ir.VectorType(ir.IntType(8), LANES))
            target = builder.add(levels, WORD(index * LANES))
            builder.store(small, builder.inttoptr(target, small.type.as_pointer()), align=1)
        count = across(builder, tree(builder, rounded, _plus), _plus)
        builder.store(scale, builder.inttoptr(scale_at, FLOAT.as_pointer()), align=4)
        product = builder.fmul(scale, builder.sitofp(count, FLOAT))
        builder.store(product, builder.inttoptr(total_at, FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, codegen


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _plus(builder: Any, a: Any, b: Any) -> Any:
    return builder.add(a, b)


def _round(builder: Any, x: Any) -> Any:
    """To the nearest integer, ties to even, lane by lane."""
    kind = ir.FunctionType(VECTOR, [VECTOR])
    name = f"llvm.roundeven.v{LANES}f32"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [x])


@overload(round_group)
def _round_group(rows, x, place):
    if not (isinstance(rows, types.BaseNamedTuple) and rows.instance_class is QuantisedRows):
        return None

    def quantise(rows, x, place):
        _quantise_group(
            x, rows.levels.ctypes.data + place * GROUP, rows.scales.ctypes.data + place * 4,
            rows.sums.ctypes.data + place * 4,
        )  # fmt: skip

    return quantise
