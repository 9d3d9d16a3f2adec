"""The definition of `engine.cpu.compute: bfloat16`, in NumPy: every form gives these bits on every processor.

Inputs x and weights w are rounded to bfloat16, ties to even; below SMALLEST they count as zero. The sum over k is
taken in blocks of 32, the depth filled up with zeros. In each block, the 16 even k are one chain of fused multiply-adds
from zero, the 16 odd k are another, and

    sum = sum + (even + odd)

with every addition rounded to float32, from zero in the order of k; out = start + sum. So does Intel's TDPBF16PS,
which takes one block for 16 x 16 elements. It also flushes denormal numbers to zero, which no form ever meets: products
are multiples of 2**-126, the smallest normal number, and rounded sums of such numbers are, too.

Infinities and NaNs follow IEEE 754; which NaN it is, is not defined.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.int8_matmul.reference import fma

Floats = NDArray[np.float32]

#: Values of k in one block.
BLOCK = 32
#: A smaller magnitude is rounded to zero. A bfloat16 that is not smaller is a multiple of 2**-63.
SMALLEST = np.float32(2.0**-56)


def to_bfloat16(values: Floats) -> Floats:
    """Rounded values, in float32; the same shape."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(values), np.float32(np.nan), (upper << 16).view(np.float32))
    return np.where(np.abs(values) < SMALLEST, np.float32(0), rounded)


def bf16_matmul(x: Floats, w: Floats, start: Floats | None = None) -> Floats:
    """x: [T, K]; w: [N, K]; start: [T, N] or None for zero. Returns [T, N] float32."""
    padding = ((0, 0), (0, -x.shape[1] % BLOCK))
    x, w = (np.pad(to_bfloat16(operand), padding) for operand in (x, w))
    total = np.zeros((len(x), len(w)), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, x.shape[1], BLOCK):
            chains = np.zeros((2, *total.shape), np.float32)  # of even k, and of odd k
            for k in range(first, first + BLOCK, 2):
                chains = fma(x[:, k : k + 2].T[:, :, None], w[:, k : k + 2].T[:, None, :], chains)
            total = total + (chains[0] + chains[1])
        return total if start is None else start + total
