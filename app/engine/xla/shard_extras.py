"""What resident adapters hold beside their rank rows in the CPU form, where several devices share a model.

In: an adapter and its slot, when it is written. Out: `ExtraTables` for each shard: addresses of its part of what is
split, and of what all shards read, which is held once. `AdapterExtras` is for one shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey, TokenRows, widened
from app.engine.cpu.extras import HeldExtras, whole_panels
from app.engine.models.spec import ModelSpec
from app.engine.xla.extra_parts import BaseValues, Part, base_bias, parts_of
from app.engine.xla.sizes import GROUP_OF, ROW_PARALLEL, Sizes, shard_columns
from app.engine.xla.weights import Weights
from app.kernels.dora.cpu import dora_scale
from app.kernels.extras import xla as own
from app.kernels.extras.cpu import ExtraTables
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL, pack
from app.kernels.matmul.quantised import Quantised
from app.kernels.matmul.storing import dequantise

Floats = NDArray[np.float32]

#: Which table says where a part of a module, or of a slot, lies.
_MODULE_TABLES = {own.WEIGHT: "weights", own.SCALE: "scales", own.SHIFT: "shifts"}
_SLOT_TABLES = {
    own.FINAL_NORM: "final_norm",
    own.EMBED_A: "embed_a",
    own.EMBED_B: "embed_b",
    own.HEAD_WEIGHT: "head_weight",
    own.HEAD_A: "head_a",
    own.HEAD_B: "head_b",
}


class ShardExtras(HeldExtras):
    """Those of a model in parts."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, weights: Weights, num_slots: int, team: Team, mesh: Mesh) -> None:
        super().__init__(sizes.num_layers, num_slots, sizes.num_shards)
        self._spec, self._sizes, self._layers, self._team = spec, sizes, weights.layers, team
        self._devices = list(mesh.devices.flat)
        self._columns = shard_columns(spec, sizes.num_shards)

    def warm_up(self) -> None:
        """Compile what `write` calls, on weights of no consequence."""
        key = LoraKey(0, TARGETS[0])
        width = self._columns[key.target].shape[1]
        nothing = np.zeros((1, self._spec.hidden_size), np.float32), np.zeros((1, width), np.float32)
        dora_scale(self._team, nothing[1][0], self._panels(key, 0), *nothing)

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """Take the slot's extras from `adapter`, dropping what was there."""
        self.release(adapter_slot)
        if not adapter.features:
            return
        self._held[adapter_slot] = []
        bias = partial(base_bias, self._layers, self._spec, self._sizes, self._columns)
        base = BaseValues(self._scales(adapter), bias)
        for part in parts_of(adapter, self._spec, self._sizes, base):
            if part.table == "slots" and part.entry[0] in (own.EMBED_ROWS, own.HEAD_ROWS, own.HEAD_IDS):
                continue
            is_shared = part.array.strides[0] == 0
            addresses = [
                self._keep(adapter_slot, self._laid_out(part, array))
                for array in part.array[: 1 if is_shared else None]
            ]
            for shard, tables in enumerate(self.shards):
                table, place = _entry(tables, part, adapter_slot)
                table[place] = addresses[0 if is_shared else shard]
        self._write_embedding(adapter_slot, adapter)
        if "lm_head" in adapter.token_rows:
            self._write_head_rows(adapter_slot, adapter.token_rows["lm_head"])
        for tables in self.shards:
            for name, ranks in (("embed_tokens", tables.embed_ranks), ("lm_head", tables.head_ranks)):
                ranks[adapter_slot] = adapter.outer[name].rank if name in adapter.outer else 0

    def _laid_out(self, part: Part, array: Floats) -> Floats:
        """A shard's part [n] as the kernels read it: a copy."""
        kind = part.entry[-1]
        if part.table == "modules":
            if kind == own.WEIGHT:
                d_in = self._sizes.group_inputs[GROUP_OF[TARGETS[part.entry[0]]]]
                return pack(array.reshape(-1, d_in))
            return whole_panels(array)
        if part.table == "slots" and kind in (own.HEAD_WEIGHT, own.HEAD_A):
            return pack(array.reshape(-1, self._spec.hidden_size))
        if part.table == "slots" and kind == own.HEAD_B:
            return pack(np.ascontiguousarray(array.reshape(-1, self._sizes.vocab_per_shard).T))
        return array.copy()

    def _write_head_rows(self, adapter_slot: int, token_rows: TokenRows) -> None:
        """To each shard the rows of its own part of the vocabulary."""
        ids = np.array(token_rows.token_ids, np.int64)
        order = np.argsort(ids)
        shards, places = np.divmod(ids[order], self._sizes.vocab_per_shard)
        for shard, tables in enumerate(self.shards):
            mine = shards == shard
            if mine.any():
                tables.head_ids[adapter_slot] = self._keep(adapter_slot, places[mine])
                tables.num_head_ids[adapter_slot] = mine.sum()
                rows = np.ascontiguousarray(token_rows.rows[order[mine]])
                tables.head_rows[adapter_slot] = self._keep(adapter_slot, pack(rows))

    def _scales(self, adapter: LoraAdapter) -> dict[LoraKey, Floats]:
        scales = {}
        for key, magnitude in adapter.magnitudes.items():
            a, b = (widened(matrix) for matrix in adapter.weights[key])
            mine = self._columns[key.target]
            panels = [self._panels(key, shard) for shard in range(len(self.shards))]
            if GROUP_OF[key.target] in ROW_PARALLEL:
                own_a = np.ascontiguousarray(a[:, mine.reshape(-1)])
                scales[key] = dora_scale(self._team, magnitude, np.concatenate(panels, axis=1), own_a, b)
                continue
            scales[key] = np.empty_like(magnitude)
            for columns, part in zip(mine, panels, strict=True):
                own_b = np.ascontiguousarray(b[:, columns])
                scales[key][columns] = dora_scale(self._team, magnitude[columns], part, a, own_b)
        return scales

    def _panels(self, key: LoraKey, shard: int) -> Floats:
        """A shard's part of a module as float32 panels [P, d_in, 16]."""
        group, start = GROUP_OF[key.target], self._sizes.first_column(key.target)
        width = self._sizes.group_outputs[group][self._sizes.module_index(key.target)]
        columns = slice(start // PANEL, -(-(start + width) // PANEL))

        def mine(array: Any) -> NDArray[Any]:
            (data,) = (part.data for part in array.addressable_shards if part.device == self._devices[shard])
            return np.asarray(data)[key.layer, columns]

        stack = jax.tree.map(mine, getattr(self._layers, group))
        return dequantise(stack) if isinstance(stack, Quantised) else stack


def _entry(tables: ExtraTables, part: Part, adapter_slot: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """The table, and where in it, that the address of a part belongs to."""
    if part.table == "slots":
        return getattr(tables, _SLOT_TABLES[part.entry[0]]), (adapter_slot,)
    assert part.layer is not None
    if part.table == "norms":
        return tables.norms, (part.layer, adapter_slot, part.entry[0])
    module, kind = part.entry
    return getattr(tables, _MODULE_TABLES[kind]), (part.layer, adapter_slot, module)
