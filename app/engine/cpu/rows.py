"""What a CPU backend needs to know of an adapter to write its rank rows, worked out once and on any thread.

In: a `LoraAdapter`. Out: `AdapterRows`, kept as long as the adapter lives. It takes a millisecond of Python for
hundreds of matrices; a step that writes the adapter finds it done, and every stream of the batch waits for that step.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraAdapter
from app.engine.models.products import targets_of, uniform_products
from app.engine.models.spec import ModelSpec
from app.kernels.sgmv.writing import Matrices, matrices


class AdapterRows(NamedTuple):
    """matrices: those of the adapter's modules. ranks: [L, N] int32, 0 for untouched modules. Modules are numbered as
    in `targets_of` the model's products."""

    matrices: Matrices
    ranks: NDArray[np.int32]


class PreparedRows:
    """`AdapterRows` by adapter. Any thread."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_layers = len(spec.layers)
        self._numbers = {target: number for number, target in enumerate(targets_of(uniform_products(spec)))}
        self._rows: WeakKeyDictionary[LoraAdapter, AdapterRows] = WeakKeyDictionary()

    def of(self, adapter: LoraAdapter) -> AdapterRows:
        """Raises AdapterMismatch for a module that a decoder of so many layers does not have."""
        rows = self._rows.get(adapter)
        if rows is None:
            rows = self._rows[adapter] = self._work_out(adapter)
        return rows

    def _work_out(self, adapter: LoraAdapter) -> AdapterRows:
        adapter.check_modules(self._numbers, self._num_layers)
        modules = [(layer, self._numbers[target], pair) for (layer, target, _), pair in adapter.weights.items()]
        ranks = np.zeros((self._num_layers, len(self._numbers)), np.int32)
        for layer, n, pair in modules:
            ranks[layer, n] = pair.rank
        return AdapterRows(matrices((layer, n, *pair) for layer, n, pair in modules), ranks)
