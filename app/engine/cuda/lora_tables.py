"""Device memory and tables of the LoRA rows of modules that every token uses.

A rank row holds one row of every module. An adapter's matrices lie one after the other from the start of its run of
rank rows, and modules that it does not change take no space. Memory and tables never move: a captured step reads their
contents when it runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.adapter import LoraAdapter, LoraKey, Matrix
from app.engine.cuda.memory import rank_row_size
from app.engine.models.linear_modules import stacked_modules
from app.engine.models.spec import ModelSpec
from app.kernels.lora_rows import START_MULTIPLE, RankRows


class Layout(NamedTuple):
    """An adapter's layout in `num_rows` rank rows.

    matrices: each with its offset from the start of the run; size: the end of the last. a, b, ranks: table entries of a
    slot by module, [L, N], L being the layers that have the module.
    """

    num_rows: int
    size: int
    matrices: list[tuple[Matrix, int]]
    a: dict[str, NDArray[np.int64]]
    b: dict[str, NDArray[np.int64]]
    ranks: dict[str, NDArray[np.int64]]


class LoraTables:
    """Tables of the linear modules that belong to no expert and no head."""

    def __init__(
        self, spec: ModelSpec, num_rows: int, max_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises CheckpointError for layers that differ in what is not their feed-forward."""
        self._stacked = tuple(one for one in stacked_modules(spec) if one.module.has_rank_rows)
        self._stacked_layers = {
            (layer, target): (module, stacked_layer)
            for module, layers in self._stacked
            for stacked_layer, layer in enumerate(layers)
            for target in module.targets
        }
        self._row_size, self._device = rank_row_size(spec), device
        #: Every adapter's matrices, [num_rows * numbers of a rank row].
        self.memory = torch.zeros(num_rows * self._row_size, dtype=dtype, device=device)
        self._tables: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # starts of a and b, ranks: [L, S, N]
        for module, layers in self._stacked:
            shape = (len(layers), max_slots, len(module.targets))
            a, b = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
            self._tables[module.name] = (a, b, torch.zeros(shape, dtype=torch.int32, device=device))

    def has(self, key: LoraKey) -> bool:
        """Whether the key names a module that every token uses."""
        return key.expert is None and key[:2] in self._stacked_layers

    def rows(self, layer: int) -> dict[str, RankRows]:
        """The tables of one layer's linear modules, by name; their addresses never change."""
        found = {}
        for module, layers in self._stacked:
            if layer in layers:
                a, b, ranks = (table[layers.index(layer)] for table in self._tables[module.name])
                found[module.name] = RankRows(self.memory, a, b, ranks, module.d_in, module.widths)
        return found

    def layout(self, adapter: LoraAdapter) -> Layout:
        """Lay out an adapter. Any thread. An array that two modules share is stored once.

        Needs at most as many rows as the largest rank, rounded up to `START_MULTIPLE`: a matrix of that many rows
        leaves no gap.
        """
        starts: dict[int, int] = {}  # by array
        matrices: list[tuple[Matrix, int]] = []
        a, b, ranks = self._empty(), self._empty(), self._empty()
        size = end = 0
        for key, pair in adapter.weights.items():
            if not self.has(key):
                continue
            for array in pair:
                if id(array) not in starts:
                    starts[id(array)], end = size, size + array.size
                    matrices.append((array, size))
                    size = -(-end // START_MULTIPLE) * START_MULTIPLE
            module, stacked_layer = self._stacked_layers[key[:2]]
            where = stacked_layer, module.targets.index(key.target)
            a[module.name][where], b[module.name][where] = starts[id(pair.a)], starts[id(pair.b)]
            ranks[module.name][where] = pair.rank
        return Layout(max(1, -(-end // self._row_size)), end, matrices, a, b, ranks)

    def run(self, row_start: int, layout: Layout) -> Tensor:
        """The memory of a run that begins at this rank row, as far as the layout uses it."""
        first = row_start * self._row_size
        assert first + layout.size <= len(self.memory), "an adapter's rows end before the memory does"
        return self.memory[first : first + layout.size]

    def point(self, adapter_slot: int, row_start: int, layout: Layout) -> None:
        """Write the slot's matrix starts and ranks to the tables, on the current stream."""
        first = row_start * self._row_size
        for name, tables in self._tables.items():
            values = layout.a[name] + first, layout.b[name] + first, layout.ranks[name]
            for table, own in zip(tables, values, strict=True):
                table[:, adapter_slot] = torch.from_numpy(own).to(self._device)

    def _empty(self) -> dict[str, NDArray[np.int64]]:
        """Zeros [L, N] by module."""
        return {
            one.module.name: np.zeros((len(one.layers), len(one.module.targets)), np.int64) for one in self._stacked
        }
