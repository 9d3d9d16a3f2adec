"""Shared shapes and tolerances of the kernel tests. Tolerances: max |out - ref| / max |ref|, per dtype."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def rng() -> np.random.Generator:
    """Fresh random data each run; the seed is in the failure message of whatever prints it."""
    return np.random.default_rng()


def normal(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return generator.standard_normal(shape).astype(np.float32)


def relative_error(out: NDArray[np.floating], reference: NDArray[np.float64]) -> float:
    """Largest deviation relative to the reference's largest value; NaN anywhere is infinite."""
    if out.size == 0:
        return 0.0
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.abs(out - reference).max() / max(float(np.abs(reference).max()), 1e-30))
