"""The definition of a mixture of experts with LoRA: one pair of token and chosen expert at a time, in float64.

    g = W_g x + B_g A_g x,  u = W_u x + B_u A_u x,  h = act(g) * u,  out = Σ_k weight * (W_d h + B_d A_d h)

Deltas belong before the activation (Shazeer et al. 2020; Hu et al. 2021); scales are folded into B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]
Doubles = NDArray[np.float64]


class ExpertRows(NamedTuple):
    """LoRA tables paged per (adapter, expert): a [N, R, d_in], b [R, W], row_starts [S, E], ranks [S, E, N]; widths of
    N.
    """

    a: Floats
    b: Floats
    widths: tuple[int, ...]
    row_starts: Integers
    ranks: Integers

    def delta(self, x: Floats, adapter_slot: int, expert: int) -> Doubles:
        """B A x of one row and one expert: [W]."""
        out = np.zeros(sum(self.widths), np.float64)
        bounds = np.cumsum([0, *self.widths])
        start = int(self.row_starts[adapter_slot, expert])
        for n, rank in enumerate(self.ranks[adapter_slot, expert].tolist()):
            rows, columns = slice(start, start + rank), slice(bounds[n], bounds[n + 1])
            shrunk = self.a[n, rows].astype(np.float64) @ x.astype(np.float64)
            out[columns] = shrunk @ self.b[rows, columns].astype(np.float64)
        return out


def mixture(
    x: Floats,
    gate_up: Floats,
    down: Floats,
    experts: Integers,
    weights: Floats,
    slots: Integers,
    gate_up_rows: ExpertRows,
    down_rows: ExpertRows,
    activation: Callable[[Doubles], Doubles],
) -> Doubles:
    """x: [T, H]. gate_up: [E, 2 I, H]. down: [E, H, I]. experts, weights: [T, K]. slots: [T]. Returns [T, H]."""
    out = np.zeros(x.shape, np.float64)
    for t, adapter_slot in enumerate(slots.tolist()):
        for expert, weight in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            both = gate_up[expert].astype(np.float64) @ x[t].astype(np.float64)
            gate, up = np.split(both + gate_up_rows.delta(x[t], adapter_slot, expert), 2)
            hidden = activation(gate) * up
            out[t] += weight * (
                down[expert].astype(np.float64) @ hidden + down_rows.delta(hidden, adapter_slot, expert)
            )
    return out
