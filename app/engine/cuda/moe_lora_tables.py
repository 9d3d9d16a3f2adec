"""Device memory and tables of adapters' LoRA rows of experts.

Each adapter has its own memory, allocated when it is written and freed when its slot is released; the engine bounds its
size (`AdapterCard.extra_bytes` counts these rows). The tables hold addresses and ranks by layer, slot and expert. They
never move: a captured step reads their contents when it runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair, Matrix
from app.engine.adapters.extra_weights import absorbed_pairs
from app.engine.models.linear_modules import LATENT_B, LATENT_KEYS, LATENT_VALUES, paged_modules
from app.engine.models.spec import ModelSpec
from app.kernels.lora_rows import ALIGNMENT, ExpertRows


class ExpertLayout(NamedTuple):
    """An adapter's layout of expert rows.

    memory: on the device, not filled yet. matrices: each with the offset of its first element. a, b, ranks: table
    entries of the slot by module, [M, E, N].
    """

    memory: Tensor
    matrices: list[tuple[Matrix, int]]
    a: dict[str, NDArray[np.int64]]
    b: dict[str, NDArray[np.int64]]
    ranks: dict[str, NDArray[np.int64]]


class MoeLoraTables:
    """Tables of the linear modules of experts and of latent heads; empty for a model with neither."""

    def __init__(self, spec: ModelSpec, max_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self._stacked = paged_modules(spec)
        self._stacked_layers = {
            (layer, target): (module, stacked_layer)
            for module, layers in self._stacked
            for stacked_layer, layer in enumerate(layers)
            for target in module.targets
        }
        self._tables: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # addresses of a and b, ranks: [M, S, E, N]
        for module, layers in self._stacked:
            shape = (len(layers), max_slots, len(module.experts), len(module.targets))
            a, b = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
            self._tables[module.name] = (a, b, torch.zeros(shape, dtype=torch.int32, device=device))
        self._layouts: dict[int, ExpertLayout] = {}

    def has(self, key: LoraKey) -> bool:
        """Whether the key names an expert's module, or the one that latent heads share."""
        if key.target in LATENT_B.targets:
            return (key.layer, LATENT_KEYS.targets[0]) in self._stacked_layers and key.expert is None
        module, _ = self._stacked_layers.get(key[:2], (None, 0))
        return module is not None and key.expert in module.experts

    def rows(self, layer: int) -> dict[str, ExpertRows]:
        """The tables of one layer's experts, by module; their addresses never change."""
        found = {}
        for module, layers in self._stacked:
            if layer in layers:
                a, b, ranks = (table[layers.index(layer)] for table in self._tables[module.name])
                found[module.name] = ExpertRows(a, b, ranks, module.d_in, module.widths[0])
        return found

    def take(self, adapter_slot: int, adapter: LoraAdapter) -> ExpertLayout | None:
        """Allocate the slot's rows, dropping its previous ones; None if the adapter changes no expert.

        Raises torch.OutOfMemoryError.
        """
        self.release(adapter_slot)
        own = self._by_expert(adapter)
        if not own:
            return None
        step = ALIGNMENT // self._dtype.itemsize
        starts: dict[int, int] = {}  # by array: one that two modules share is stored once
        matrices: list[tuple[Matrix, int]] = []
        size = 0
        for array in (array for pair in own.values() for array in pair):
            if id(array) not in starts:
                starts[id(array)] = size
                matrices.append((array, size))
                size += -(-array.size // step) * step
        memory = torch.empty(size, dtype=self._dtype, device=self._device)
        base = memory.data_ptr()
        assert base % ALIGNMENT == 0, "allocators align to more than that"
        a, b, ranks = self._empty(), self._empty(), self._empty()
        for key, pair in own.items():
            module, stacked_layer = self._stacked_layers[key[:2]]
            where = stacked_layer, key.expert, module.targets.index(key.target)
            a[module.name][where] = base + starts[id(pair.a)] * self._dtype.itemsize
            b[module.name][where] = base + starts[id(pair.b)] * self._dtype.itemsize
            ranks[module.name][where] = pair.rank
        layout = self._layouts[adapter_slot] = ExpertLayout(memory, matrices, a, b, ranks)
        return layout

    def point(self, adapter_slot: int, layout: ExpertLayout | None) -> None:
        """Write the slot's addresses and ranks to the tables, on the current stream."""
        for name, tables in self._tables.items():
            if layout is None:
                tables[2][:, adapter_slot] = 0
                continue
            for table, values in zip(tables, (layout.a[name], layout.b[name], layout.ranks[name]), strict=True):
                table[:, adapter_slot] = torch.from_numpy(values).to(self._device)

    def release(self, adapter_slot: int) -> None:
        """Free the slot's memory. Its table entries may remain: no running step uses the slot."""
        self._layouts.pop(adapter_slot, None)

    def _by_expert(self, adapter: LoraAdapter) -> dict[LoraKey, LoraPair]:
        """The adapter's deltas of experts, and that of `kv_b_proj` by head, on both sides of attention."""
        own = {}
        for key, pair in adapter.weights.items():
            if key.expert is not None:
                own[key] = pair
            elif key.target in LATENT_B.targets:
                parts = absorbed_pairs(pair, self._spec.layers[key.layer].attention)
                for kind, by_head in zip((LATENT_KEYS, LATENT_VALUES), parts, strict=True):
                    own |= {LoraKey(key.layer, kind.targets[0], head): one for head, one in enumerate(by_head)}
        return own

    def _empty(self) -> dict[str, NDArray[np.int64]]:
        """Zeros [M, E, N] by module."""
        return {
            module.name: np.zeros((len(layers), len(module.experts), len(module.targets)), np.int64)
            for module, layers in self._stacked
        }
