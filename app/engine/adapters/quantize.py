"""Adapter tensors in 8 or 4 bits: a storage format only, served as float32.

Each group of 64 consecutive values has one float32 scale. Symmetric: value = integer * scale, with integers in
-127..127 or -7..7, so zero stays zero. Two 4-bit values share a byte, the first in the low half; an odd last byte's
high half is 0. `delta_error` measures the effect on an adapter's output, and its card records it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUP = 64
_MAX_INTEGER = {"I8": 127, "I4": 7}


class Quantization(NamedTuple):
    """The dtype an adapter was rounded to, and the maximum and mean `delta_error` over its modules."""

    dtype: str
    max_error: float
    mean_error: float


def quantize(values: NDArray[np.float32], dtype: str) -> tuple[bytes, bytes]:
    """(integers, scales) of `values` read in storage order; `dtype` is "I8" or "I4"."""
    flat = values.reshape(-1)
    groups = np.zeros((-(-flat.size // GROUP), GROUP), np.float32)  # [G, 64]
    groups.reshape(-1)[: flat.size] = flat
    limit = _MAX_INTEGER[dtype]
    scales = np.abs(groups).max(axis=1) / np.float32(limit)  # [G]
    # A scale of 0 means a group of zeros (or of values below float32's range).
    divisors = np.where(scales > 0, scales, np.float32(1))
    integers = np.clip(np.rint(groups / divisors[:, None]), -limit, limit).astype(np.int8)
    integers = integers.reshape(-1)[: flat.size]
    if dtype == "I4":
        nibbles = np.zeros(2 * (-(-flat.size // 2)), np.uint8)
        nibbles[: flat.size] = integers.view(np.uint8) & 0x0F
        return (nibbles[0::2] | (nibbles[1::2] << 4)).tobytes(), scales.astype("<f4").tobytes()
    return integers.tobytes(), scales.astype("<f4").tobytes()


def dequantize(data: memoryview, scales: memoryview | bytes, dtype: str, num_values: int) -> NDArray[np.float32]:
    """The `num_values` float32 values that `quantize` rounded to."""
    if dtype == "I4":
        packed = np.frombuffer(data, np.uint8)
        nibbles = np.empty(2 * packed.size, np.uint8)
        nibbles[0::2], nibbles[1::2] = packed & 0x0F, packed >> 4
        integers = ((nibbles[:num_values] ^ 8).astype(np.int16) - 8).astype(np.float32)  # sign of four bits
    else:
        integers = np.frombuffer(data, np.int8).astype(np.float32)
    groups = np.repeat(np.frombuffer(scales, "<f4").astype(np.float32), GROUP)[:num_values]
    with np.errstate(over="ignore", invalid="ignore"):  # a forged scale; the caller refuses values that are not finite
        return np.asarray(integers * groups, np.float32)


def num_groups(num_values: int) -> int:
    return -(-num_values // GROUP)


def delta_error(
    a: NDArray[np.float32], b: NDArray[np.float32], other_a: NDArray[np.float32], other_b: NDArray[np.float32]
) -> float:
    """‖B'A' - BA‖ / ‖BA‖ (Frobenius), a `[r, d_in]`, b `[d_out, r]`: the relative RMS error of a module's output on
    inputs of equal variance. The products are never formed; 0 if both deltas are 0.
    """
    size = _frobenius(a, b)
    left = np.concatenate([other_b, -b], axis=1)
    right = np.concatenate([other_a, a], axis=0)
    error = _frobenius(right, left)
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def _frobenius(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """‖BA‖ from the r × r Gram matrices, in float64: ‖BA‖² = Σ (BᵀB ∘ AAᵀ)."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    return math.sqrt(max(0.0, float(np.sum((wide_b.T @ wide_b) * (wide_a @ wide_a.T)))))
