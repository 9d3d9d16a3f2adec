"""The definition: a linear module's rows with their adapters, one row at a time.

y = W x + bias + B (A x); with a weight of the adapter's own, W' x replaces all of that; then scale * y + shift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.activation.reference import Activation, gated_activation
from app.kernels.extra_weights.reference import module

Floats = NDArray[np.float32]


class ModuleAdapter(NamedTuple):
    """An adapter's part in one module: a [r, d_in] and b [r, d_out] with the scale folded in, and extra weights."""

    a: Floats | None = None
    b: Floats | None = None
    weight: Floats | None = None
    scale: Floats | None = None
    shift: Floats | None = None


def linear(
    x: NDArray[np.floating],
    w: Floats,
    bias: Floats | None,
    slots: Sequence[int],
    adapters: Mapping[int, ModuleAdapter],
) -> NDArray[np.float64]:
    """x: [T, d_in]; w: [d_out, d_in]; bias: [d_out]; slots: [T], adapter slots. Returns [T, d_out] float64."""
    out = x.astype(np.float64) @ w.astype(np.float64).T
    for t, slot in enumerate(slots):
        row, adapter = x[t].astype(np.float64), adapters.get(slot, ModuleAdapter())
        if bias is not None:
            out[t] += bias
        if adapter.a is not None and adapter.b is not None:
            out[t] += (adapter.a.astype(np.float64) @ row) @ adapter.b.astype(np.float64)
        out[t] = module(out[t], x[t], adapter.weight, adapter.scale, adapter.shift)
    return out


def gate_and_up(
    x: NDArray[np.floating],
    weights: tuple[Floats, Floats],
    biases: tuple[Floats, Floats] | None,
    slots: Sequence[int],
    adapters: tuple[Mapping[int, ModuleAdapter], Mapping[int, ModuleAdapter]],
    activation: Activation,
) -> NDArray[np.float64]:
    """act(gate) * up [T, d_out], both modules computed by `linear`; pairs are gate's and up's."""
    parts = [
        linear(x, weights[n], None if biases is None else biases[n], slots, adapters[n]) for n in range(len(weights))
    ]
    return gated_activation(np.concatenate(parts, axis=1), activation)
