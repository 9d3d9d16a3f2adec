"""The definition of a draw: one row of logits, its parameters, one token.

Randomness is a counter: the uniform number of a draw is a hash of (seed, position), so a request draws the
same token alone or in any batch, and again after a restart elsewhere. NumPy, one row at a time.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A float in [0, 1) from (seed, position), both 64 bits wide."""
    key = _mix((seed + _GOLDEN) & _MASK)
    return (_mix(key ^ _mix((position + 2 * _GOLDEN) & _MASK)) >> 11) / 9007199254740992.0


def log_sum_exp(row: NDArray[np.float32]) -> float:
    """log(sum(exp(row))) of a row [V], in float64."""
    top = float(row.max())
    return top + math.log(float(np.exp(row - np.float32(top)).sum(dtype=np.float64)))


def draw(
    row: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """One token from a row of logits [V]; temperature 0 is the largest logit, ties to the smallest id.

    Filters apply in transformers' order: temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et
    al. 2024); values equal to a cut-off stay in.
    """
    if temperature == 0:
        return int(row.argmax())
    p = np.exp((row - row.max()) * (np.float32(1.0) / np.float32(temperature)))
    floor = np.float32(0.0)
    if 0 < top_k < len(p):
        floor = np.partition(p, len(p) - top_k)[len(p) - top_k]
    if top_p < 1.0:
        candidates = np.sort(p[p >= floor])[::-1]
        mass = np.cumsum(candidates, dtype=np.float64)
        wanted = np.float64(np.float32(top_p)) * mass[-1]
        floor = candidates[min(int(np.searchsorted(mass, wanted)), len(mass) - 1)]
    floor = max(floor, np.float32(min_p))
    kept = np.flatnonzero((p >= floor) & (p > 0))
    mass = np.cumsum(p[kept], dtype=np.float64)
    index = int(np.searchsorted(mass, uniform(seed, position) * mass[-1], side="right"))
    return int(kept[min(index, len(kept) - 1)])
