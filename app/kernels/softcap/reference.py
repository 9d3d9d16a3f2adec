"""The definition of scaled embeddings and soft caps (Gemma Team 2024)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def cap_value(x: float, cap: float) -> float:
    """cap * tanh(x / cap): between -cap and cap, and about x where it is small."""
    return cap * math.tanh(x / cap)


def cap_rows(x: Floats, cap: float) -> NDArray[np.float64]:
    """Every element of x [T, N] capped."""
    return np.array([[cap_value(float(value), cap) for value in row] for row in x], np.float64).reshape(x.shape)
