"""The layout of an adapter in a CPU engine's rank rows, computed once, on any thread.

It takes a millisecond of Python for hundreds of matrices and is cached while the adapter lives, so that the step that
writes the adapter, and every stream in its batch, does not wait for it.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair, unknown_module
from app.engine.adapters.extra_weights import absorbed_pairs
from app.engine.models.linear_modules import (
    LATENT_B,
    LATENT_KEYS,
    LATENT_VALUES,
    paged_modules,
    shared_table_modules,
    stacked_modules,
    targets_of,
)
from app.engine.models.spec import ModelSpec
from app.kernels.matmul.cpu import PANEL
from app.kernels.sgmv.adapter_copy import Matrices, Packing, matrices, packing


def row_bytes(spec: ModelSpec) -> int:
    """Bytes of one rank row: in float32, a row of a and one of b of every module that every token uses."""
    return 4 * sum(
        len(layers) * (len(module.targets) * module.d_in + module.width(PANEL))
        for module, layers in stacked_modules(spec)
        if module.has_rank_rows
    )


class ExpertMatrices(NamedTuple):
    """Matrices of experts and their positions.

    linear_modules: [M], an index among the linear modules with experts. stacked_layers: [M], the index of the layer
    among its layers. modules: [M], the index of the target in its linear module.
    """

    matrices: Matrices
    packing: Packing
    linear_modules: NDArray[np.int64]
    stacked_layers: NDArray[np.int64]
    experts: NDArray[np.int64]
    modules: NDArray[np.int64]


class AdapterLayout(NamedTuple):
    """`matrices` are those of modules that every token uses; `packing` places them in `num_rows` rank rows. ranks: [L,
    N] int32, 0 for unchanged modules.

    Modules are numbered as in `targets_of` the model's `shared_table_modules`, layers by their index among those with
    the module. experts: None if no expert is changed.
    """

    matrices: Matrices
    packing: Packing
    num_rows: int
    ranks: NDArray[np.int32]
    experts: ExpertMatrices | None


class AdapterLayoutCache:
    """The `AdapterLayout` of each living adapter. Any thread."""

    def __init__(self, spec: ModelSpec) -> None:
        stacked = stacked_modules(spec)
        self._num_layers, self._row_bytes = len(spec.layers), row_bytes(spec)
        self._numbers = {target: number for number, target in enumerate(targets_of(shared_table_modules(stacked)))}
        self._spec = spec
        self._expert_modules = {
            target: (n, one.module) for n, one in enumerate(paged_modules(spec)) for target in one.module.targets
        }
        self._stacked_layers = {
            (layer, target): stacked_layer
            for one in stacked
            for stacked_layer, layer in enumerate(one.layers)
            for target in one.module.targets
        }
        self._layouts: WeakKeyDictionary[LoraAdapter, AdapterLayout] = WeakKeyDictionary()

    def of(self, adapter: LoraAdapter) -> AdapterLayout:
        """The adapter's layout. Raises AdapterMismatch for a module that this model does not have."""
        layout = self._layouts.get(adapter)
        if layout is None:
            layout = self._layouts[adapter] = self._compute(adapter)
        return layout

    def _compute(self, adapter: LoraAdapter) -> AdapterLayout:
        modules, of_experts = [], []
        for key, pair in adapter.weights.items():
            self._check(key)
            if key.target in LATENT_B.targets:
                of_experts += self._by_head(key, pair)
            elif key.expert is None:
                modules.append((self._stacked_layers[key[:2]], self._numbers[key.target], pair))
            else:
                of_experts.append((key, pair))
        ranks = np.zeros((self._num_layers, len(self._numbers)), np.int32)
        for stacked_layer, n, pair in modules:
            ranks[stacked_layer, n] = pair.rank
        own = matrices((stacked_layer, n, *pair) for stacked_layer, n, pair in modules)
        experts = self._expert_matrices(of_experts) if of_experts else None
        packed = packing(own)
        return AdapterLayout(own, packed, max(1, -(-packed.num_bytes // self._row_bytes)), ranks, experts)

    def _by_head(self, key: LoraKey, pair: LoraPair) -> list[tuple[LoraKey, LoraPair]]:
        keys, values = absorbed_pairs(pair, self._spec.layers[key.layer].attention)
        kinds = zip((LATENT_KEYS, LATENT_VALUES), (keys, values), strict=True)
        return [
            (LoraKey(key.layer, kind.targets[0], head), one) for kind, ones in kinds for head, one in enumerate(ones)
        ]

    def _check(self, key: LoraKey) -> None:
        _, module = self._expert_modules.get(key.target, (0, None))
        experts = (None,) if module is None else module.experts
        if key[:2] not in self._stacked_layers or key.expert not in experts:
            raise unknown_module(key)

    def _expert_matrices(self, pairs: list[tuple[LoraKey, LoraPair]]) -> ExpertMatrices:
        lines: list[tuple[int, ...]] = []
        for key, _ in pairs:
            index, module = self._expert_modules[key.target]
            assert key.expert is not None, "an expert's matrix has an expert"
            stacked_layer = self._stacked_layers.get(key[:2], key.layer)  # heads' modules are in every layer
            lines.append((index, stacked_layer, key.expert, module.targets.index(key.target)))
        columns = np.ascontiguousarray(np.array(lines, np.int64).T)
        own = matrices((0, 0, *pair) for _, pair in pairs)
        return ExpertMatrices(own, packing(own), *columns)
