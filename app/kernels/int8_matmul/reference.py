"""The definition of `engine.cpu.compute: int8`, in NumPy: every form gives these bits on every processor.

A row x is cut into groups g of 32 along the sum. With a = max |x[g]|, its scale is s = a / 127 and its levels are
q = round(x * (127 / a)), ties to even: llama.cpp's Q8_1. Weights w = scale * level + offset have the same groups, so

    out[n] = start[n] + sum over g of (scale[n, g] * s[g]) * (sum over k of level[n, k] * q[k]) + offset[n, g] * b[g]

with b[g] = s[g] * (sum of q[g]). The inner sums are integers and exact. The outer sum is one chain of fused
multiply-adds from zero: for each group in order, first the levels' term, then the offset's. Every other operation is
rounded once to float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Values of a row, and weights of a column, that share a scale.
GROUP = 32
#: The largest level of a row.
MAX_LEVEL = np.float32(127)
#: A group whose largest value is below this counts as zeros: 127 / a would be infinite soon.
SMALLEST = np.float32(1e-30)


class Rows(NamedTuple):
    """Quantised rows. levels: [T, G * 32] int8, zero past the depth; scales, sums: [T, G] float32 (s and b above)."""

    levels: NDArray[np.int8]
    scales: Floats
    sums: Floats


def quantise_rows(x: Floats) -> Rows:
    """x: [T, K] -> `Rows`. A group that holds an infinity or NaN gets levels 0 and the scale NaN."""
    num_rows, depth = x.shape
    num_groups = -(-depth // GROUP)
    padded = np.zeros((num_rows, num_groups * GROUP), np.float32)
    padded[:, :depth] = x
    groups = padded.reshape(num_rows, num_groups, GROUP)
    largest = np.abs(groups).max(axis=2, initial=0)  # NaN if any value is
    used = np.isfinite(largest) & (largest >= SMALLEST)
    safe = np.where(used, largest, np.float32(1))
    scales = np.where(used, safe / MAX_LEVEL, np.where(np.isfinite(largest), np.float32(0), np.float32(np.nan)))
    kept = np.where(used[:, :, None], groups, np.float32(0))
    levels = np.rint(kept * (MAX_LEVEL / safe)[:, :, None]).astype(np.int8)
    sums = scales * levels.sum(axis=2, dtype=np.int32).astype(np.float32)
    return Rows(levels.reshape(padded.shape), scales, sums)


def int8_matmul(
    x: Floats, levels: NDArray[np.uint8], scales: Floats, offsets: Floats, start: Floats | None = None
) -> Floats:
    """x: [T, K]; levels: [N, K]; scales, offsets: [N, G]; start: [T, N] or None for zero. Returns [T, N] float32."""
    rows = quantise_rows(x)
    (num_rows, depth), num_columns = x.shape, len(levels)
    out = np.zeros((num_rows, num_columns), np.float32)
    for g in range(scales.shape[1]):
        group = slice(g * GROUP, min((g + 1) * GROUP, depth))
        dots = rows.levels[:, group].astype(np.int32) @ levels[:, group].astype(np.int32).T  # [T, N]
        out = fma(dots.astype(np.float32), rows.scales[:, g, None] * scales[None, :, g], out)
        out = fma(offsets[None, :, g], rows.sums[:, g, None], out)
    return out if start is None else start + out


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once to float32. Arrays that broadcast.

    The product is exact in float64; the sum is rounded there to odd, after which rounding to float32 cannot err
    (Boldo and Melquiond 2008).
    """
    product, term = np.float64(1) * a * b, np.float64(1) * c
    total = product + term
    with np.errstate(invalid="ignore"):
        part = total - product
        error = (product - (total - part)) + (term - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & np.isfinite(error) & even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)
