"""Rounding to bfloat16, of a row on its way into KV memory and of an adapter's rows.

`round_rows` copies rows from many arrays into one buffer: it prepares an adapter in host memory for the copy to a
device, so it runs without the GIL and reads every number once.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import bits_from_float, float_from_bits


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@jit
def _bfloat16_bits(bits):
    """`reference.bfloat16_bits` of a float32's bits."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.uint16(0x7FC0) if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else np.uint16(rounded)


@jit
def store_row(row, out):
    """out[i] = row[i], of float32, for all of row: float32, or in uint16 the bits of the nearest bfloat16."""
    for i in range(row.shape[0]):
        if out.itemsize == 2:
            out[i] = _bfloat16_bits(bits_from_float(row[i]))
        else:
            out[i] = row[i]


@jit
def widen_row(row, out):
    """out[i] = row[i], of bfloat16 bits in uint16, in float32."""
    for i in range(row.shape[0]):
        out[i] = float_from_bits(np.int32(row[i]) << np.int32(16))


@jit
def round_rows(tasks, first, end, row_size, buffer):
    """buffer[r - first, column + i] = matrix[r, i], for rows first to end of each task's matrix.

    tasks: [J, 4] int64: the matrix's address (float32, C-contiguous), rows, width, and first column in a row of the
    buffer. buffer: [>= (end - first) * row_size], uint16: rounded to the nearest bfloat16, ties to even; or uint32:
    the float32 bits. In place.
    """
    for j in range(tasks.shape[0]):
        address, rows, width, column = tasks[j, 0], tasks[j, 1], tasks[j, 2], tasks[j, 3]
        matrix = carray(_pointer(address), (rows, width), np.uint32)
        for r in range(first, min(end, rows)):
            row = buffer[(r - first) * row_size + column : (r - first) * row_size + column + width]
            if buffer.itemsize == 2:
                for i in range(width):
                    row[i] = _bfloat16_bits(matrix[r, i])
            else:
                for i in range(width):
                    row[i] = matrix[r, i]


def tasks_of(parts: list[tuple[NDArray[np.float32], int]]) -> NDArray[np.int64]:
    """Tasks for (C-contiguous matrix [r, width], first column); the caller keeps the matrices alive."""
    return np.array([(part.ctypes.data, *part.shape, column) for part, column in parts], np.int64).reshape(-1, 4)
