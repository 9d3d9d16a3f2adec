"""The definition: gelu(x) = x / 2 (1 + erf(x / sqrt(2))), element by element (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def gelu(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """x: any shape. Returns x's shape in float64."""
    values = [0.5 * value * (1.0 + math.erf(value / math.sqrt(2.0))) for value in x.astype(np.float64).flat]
    return np.array(values).reshape(x.shape)
