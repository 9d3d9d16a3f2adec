"""Shared shapes and tolerances of the kernel tests. Tolerances: max |out - ref| / max |ref|, per dtype."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def normal(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return generator.standard_normal(shape).astype(np.float32)


def relative_error(out: NDArray[np.floating], reference: NDArray[np.float64], *parts: NDArray[np.floating]) -> float:
    """Largest deviation relative to the reference's largest value; NaN anywhere is infinite.

    Relative to the largest of `parts`, if that is more: a sum of few numbers may be next to nothing beside what was
    added up, and rounding is not.
    """
    if out.size == 0:
        return 0.0
    if not np.isfinite(out).all():
        return float("inf")
    size = max(float(np.abs(values).max()) for values in (reference, *parts))
    return float(np.abs(out - reference).max() / max(size, 1e-30))
