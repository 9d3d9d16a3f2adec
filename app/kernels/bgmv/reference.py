"""The definition: y[t] + B (A x[t]) per slice with the rows of row t's adapter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


def add_lora(
    x: Floats,
    y: Floats,
    a: Floats,
    b: Floats,
    widths: Sequence[int],
    slots: Integers,
    row_starts: Integers,
    ranks: Integers,
) -> NDArray[np.float64]:
    """A module's output with its adapters (Hu et al. 2021), row by row.

    x: [T, d_in]. y: [T, W], the base product. a: [N, R, d_in]. b: [R, W], scale folded in. widths: of the N slices.
    slots: [T]. row_starts: [S]. ranks: [S, N].
    Returns [T, W] float64; rows whose adapter has no rank are y's.
    """
    out = y.astype(np.float64)
    bounds = np.cumsum([0, *widths])
    for t, s in enumerate(slots):
        for n in range(len(widths)):
            rows = slice(int(row_starts[s]), int(row_starts[s]) + int(ranks[s, n]))
            columns = slice(int(bounds[n]), int(bounds[n + 1]))
            shrunk = a[n, rows].astype(np.float64) @ x[t].astype(np.float64)
            out[t, columns] += shrunk @ b[rows, columns].astype(np.float64)
    return out
