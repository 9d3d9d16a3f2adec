"""Copy float32 rows from many arrays into one buffer, optionally rounded to bfloat16, on any number of threads.

It prepares an adapter in host memory for the copy to a device, so it runs without the GIL and reads every number once.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.machine.jit import jit


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@jit
def round_rows(tasks, first, end, row_size, buffer):
    """buffer[r - first, column + i] = matrix[r, i], for rows first to end of each task's matrix.

    tasks: [J, 4] int64: the matrix's address (float32, C-contiguous), rows, width, and first column in a row of the
    buffer. buffer: [>= (end - first) * row_size], uint16: rounded to the nearest bfloat16, ties to even; or uint32:
    the float32 bits. In place. The numbers are finite.
    """
    for j in range(tasks.shape[0]):
        address, rows, width, column = tasks[j, 0], tasks[j, 1], tasks[j, 2], tasks[j, 3]
        matrix = carray(_pointer(address), (rows, width), np.uint32)
        for r in range(first, min(end, rows)):
            row = buffer[(r - first) * row_size + column : (r - first) * row_size + column + width]
            if buffer.itemsize == 2:
                for i in range(width):
                    bits = matrix[r, i]
                    odd = (bits >> np.uint32(16)) & np.uint32(1)
                    row[i] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            else:
                for i in range(width):
                    row[i] = matrix[r, i]


def tasks_of(parts: list[tuple[NDArray[np.float32], int]]) -> NDArray[np.int64]:
    """Tasks for (C-contiguous matrix [r, width], first column); the caller keeps the matrices alive."""
    return np.array([(part.ctypes.data, *part.shape, column) for part, column in parts], np.int64).reshape(-1, 4)
