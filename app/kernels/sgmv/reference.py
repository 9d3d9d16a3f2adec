"""The definition: out[t] += b_rows.T @ (a_rows @ x[t]), with the rows of token t's adapter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lora_delta(
    x: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    run_starts: NDArray[np.int32],
    run_adapter_slots: NDArray[np.int32],
    row_starts: NDArray[np.int64],
    ranks: NDArray[np.int32],
) -> NDArray[np.float64]:
    """The delta to add to the base product (Hu et al. 2021), one row at a time.

    x: [T, d_in]; a: [R, d_in]; b: [R, d_out], scale folded in; run_starts: [G+1]; run_adapter_slots:
    [G]; row_starts, ranks: [S], rank 0 for the base. Returns [T, d_out] float64, exact zeros for
    tokens without an adapter.
    """
    delta = np.zeros((x.shape[0], b.shape[1]), np.float64)
    for g, adapter_slot in enumerate(run_adapter_slots):
        rank = int(ranks[adapter_slot])
        rows = slice(int(row_starts[adapter_slot]), int(row_starts[adapter_slot]) + rank)
        for t in range(int(run_starts[g]), int(run_starts[g + 1])):
            if rank:
                delta[t] = (a[rows].astype(np.float64) @ x[t].astype(np.float64)) @ b[rows].astype(np.float64)
    return delta
