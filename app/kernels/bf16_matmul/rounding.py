"""Rounds rows, and weights, to bfloat16 as `app.kernels.bf16_matmul.reference` defines it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import DTypeLike, NDArray

from app.kernels.bf16_matmul.reference import SMALLEST
from app.kernels.machine.row_groups import round_group
from app.kernels.machine.simd import GROUP
from app.kernels.machine.vectors import INTS, LANES, WORD, load

_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
#: The length of a cache line and of a tile's row: tiles are loaded twice as fast if their rows begin with lines.
_LINE_BYTES = 64


class RoundedRows(NamedTuple):
    """Memory for the rounded rows of one product at a time, flat, laid out as `round_group` says.

    values: bfloat16 bits in uint16, as tiles take them, or the same numbers in float32, as vectors do.
    """

    values: NDArray[Any]


def new_rows(num_values: int, dtype: DTypeLike) -> RoundedRows:
    """Memory for `num_values` values, a multiple of 32."""
    rows = aligned_empty((num_values,), dtype)
    rows[:] = 0
    return RoundedRows(rows)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array that begins with a cache line; the contents are arbitrary."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % _LINE_BYTES
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def _constant(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


@intrinsic
def _round_32(typingctx: Any, x: Any, out: Any, is_narrow: Any) -> Any:
    """Round 32 float32 at address x; at address `out` uint16 [32] (is_narrow) or float32 [32] are written."""
    signature = types.void(types.intp, types.intp, types.boolean)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, out, is_narrow = args
        rounded = []
        for first in range(0, GROUP, LANES):
            bits = builder.bitcast(load(builder, x, WORD(first)), INTS)
            magnitude = builder.and_(bits, _constant(_MAGNITUDE))
            odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
            upper = builder.lshr(builder.add(bits, builder.add(odd, _constant(0x7FFF))), _constant(16))
            is_nan = builder.icmp_signed(">", magnitude, _constant(_INFINITY))
            is_small = builder.icmp_signed("<", magnitude, _constant(int(SMALLEST.view(np.int32))))
            upper = builder.select(is_nan, _constant(_NAN >> 16), upper)
            rounded.append(builder.select(is_small, _constant(0), upper))
        with builder.if_else(is_narrow) as (narrow, wide):
            with narrow:
                half = ir.VectorType(ir.IntType(16), LANES)
                for index, upper in enumerate(rounded):
                    at = builder.add(out, WORD(2 * index * LANES))
                    builder.store(builder.trunc(upper, half), builder.inttoptr(at, half.as_pointer()), align=2)
            with wide:
                for index, upper in enumerate(rounded):
                    at = builder.inttoptr(builder.add(out, WORD(4 * index * LANES)), INTS.as_pointer())
                    builder.store(builder.shl(upper, _constant(16)), at, align=4)
        return context.get_dummy_value()

    return signature, codegen


@overload(round_group)
def _round_group(rows, x, place):
    if not (isinstance(rows, types.BaseNamedTuple) and rows.instance_class is RoundedRows):
        return None
    is_narrow = rows.types[0].dtype == types.uint16
    size = GROUP * (2 if is_narrow else 4)
    return lambda rows, x, place: _round_32(x, rows.values.ctypes.data + place * size, is_narrow)
