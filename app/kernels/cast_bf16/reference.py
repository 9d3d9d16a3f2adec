"""The definition: every float32 as its nearest bfloat16, ties to the one whose last bit is 0; every NaN as 0x7FC0.

A bfloat16 is the upper half of a float32's bits, so its neighbour away from zero is the next integer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """values: any shape. Returns their bfloat16 bits, the same shape."""
    out = np.empty(values.shape, np.uint16)
    for at in np.ndindex(values.shape):
        upper, lower = divmod(int(values[at].view(np.uint32)), 1 << 16)
        nearer_next = lower > 1 << 15 or (lower == 1 << 15 and upper % 2 == 1)
        out[at] = 0x7FC0 if np.isnan(values[at]) else upper + nearer_next
    return out
