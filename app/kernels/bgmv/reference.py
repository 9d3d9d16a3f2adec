"""The definition: y[t] + B (A x[t]) per slice with the rows of row t's adapter, then its scale and shift if any."""

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
    extra_rows: Integers | None = None,
    scales: Floats | None = None,
    shifts: Floats | None = None,
    x_divisor: int = 1,
) -> NDArray[np.float64]:
    """A module's output with its adapters (Hu et al. 2021; the scale is DoRA's, Liu et al. 2024), row by row.

    x: [ceil(T / x_divisor), d_in]. y: [T, W], the base product. a: [N, R, d_in]. b: [R, W], scale folded in. widths: of
    the N slices. slots: [T]. row_starts: [S]. ranks: [S, N]. extra_rows: [S], 0 for none; scales, shifts: [X, W].
    Returns [T, W] float64; rows whose adapter has neither rank nor extras are y's.
    """
    out = y.astype(np.float64)
    bounds = np.cumsum([0, *widths])
    for t, s in enumerate(slots):
        for n in range(len(widths)):
            rows = slice(int(row_starts[s]), int(row_starts[s]) + int(ranks[s, n]))
            columns = slice(int(bounds[n]), int(bounds[n + 1]))
            shrunk = a[n, rows].astype(np.float64) @ x[t // x_divisor].astype(np.float64)
            out[t, columns] += shrunk @ b[rows, columns].astype(np.float64)
        if extra_rows is not None and extra_rows[s]:
            assert scales is not None
            assert shifts is not None
            out[t] = scales[extra_rows[s]] * out[t] + shifts[extra_rows[s]]
    return out
