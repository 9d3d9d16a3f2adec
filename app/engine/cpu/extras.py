"""What resident adapters hold beside their rank rows, on a CPU: DoRA scales, biases, norms, whole matrices, token rows.

In: an adapter and its slot, when it is written. Out: `ExtraTables` for the kernels of either engine, and the runs of a
step that need them. What can be computed once is computed here: a module's output is multiplied by one vector
and one is added, whatever made them. Memory is allocated per adapter and freed when its slot is
released; how much may be held is the engine's business (`AdapterCard.extra_bytes`).
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.extras import (
    ModuleExtras,
    embedding_ids,
    embedding_rows,
    module_extras,
    module_shift,
    replaced_norms,
)
from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey, LoraPair, widened
from app.engine.models.spec import ModelSpec
from app.kernels.dora.cpu import dora_scale
from app.kernels.extras.cpu import ATTENTION_NORM, K_NORM, MLP_NORM, Q_NORM, ExtraTables, empty_tables
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL, pack

Floats = NDArray[np.float32]

_LAYER_NORMS = {
    "input_layernorm": ATTENTION_NORM,
    "post_attention_layernorm": MLP_NORM,
    "self_attn.q_norm": Q_NORM,
    "self_attn.k_norm": K_NORM,
}


class BaseModules(Protocol):
    """The base's linear modules, as an engine keeps them."""

    def panels(self, key: LoraKey) -> Floats:
        """A module's weight as float32 panels [P, d_in, 16]."""
        ...

    def bias(self, key: LoraKey) -> Floats | None:
        """Its bias [d_out], if it has one."""
        ...


class HeldExtras:
    """Arrays by adapter slot, and their addresses in tables, one of these for each shard of a model."""

    def __init__(self, num_layers: int, max_adapter_slots: int, num_shards: int) -> None:
        self.shards = [empty_tables(num_layers, max_adapter_slots, len(TARGETS)) for _ in range(num_shards)]
        self._held: dict[int, list[NDArray[np.generic]]] = {}

    def held_bytes(self, adapter_slot: int) -> int:
        return sum(array.nbytes for array in self._held.get(adapter_slot, ()))

    def release(self, adapter_slot: int) -> None:
        """Forget the slot's extras and free their memory."""
        if self._held.pop(adapter_slot, None) is not None:
            for tables in self.shards:
                for table in tables:
                    table[(slice(None),) * (table.ndim > 1) + (adapter_slot,)] = 0

    @property
    def head_width(self) -> int:
        """Width that `own_head_inputs` needs for any adapter held, in any shard."""
        widths = [-(-tables.num_head_ids // PANEL) - (-tables.head_ranks // PANEL) for tables in self.shards]
        return int(np.max(widths)) * PANEL

    def runs(self, runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the runs [G, 3] (first, end, adapter slot) whose adapter has extras."""
        return runs_of(runs, self._held)

    def _keep(self, adapter_slot: int, array: NDArray[np.generic]) -> int:
        """Hold an array for the slot; returns its address."""
        self._held[adapter_slot].append(array)
        return array.ctypes.data

    def _write_embedding(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """The rows that stand in for the embedding's: held once, for every shard."""
        rows, ids = embedding_rows(adapter), embedding_ids(adapter)
        if rows is None:
            return
        order = slice(None) if ids is None else np.argsort(ids)
        place = self._keep(adapter_slot, np.array(rows[order], order="C"))
        ids_place = 0 if ids is None else self._keep(adapter_slot, ids[order])
        for tables in self.shards:
            tables.embed_rows[adapter_slot], tables.embed_ids[adapter_slot] = place, ids_place
            tables.num_embed_ids[adapter_slot] = 0 if ids is None else len(ids)


class AdapterExtras(HeldExtras):
    """Those of a model in one piece."""

    def __init__(self, spec: ModelSpec, base: BaseModules, max_adapter_slots: int, team: Team) -> None:
        super().__init__(len(spec.layers), max_adapter_slots, num_shards=1)
        self._team = team
        self._spec = spec
        self._base = base

    @property
    def tables(self) -> ExtraTables:
        """The only shard's."""
        return self.shards[0]

    def warm_up(self) -> None:
        """Compile what `write` calls, on weights of no consequence."""
        key = LoraKey(0, TARGETS[0])
        d_in, d_out = self._spec.target_shape(*key[:2])
        nothing = LoraPair(np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32))
        dora_scale(self._team, nothing.b[0], self._base.panels(key), nothing.a, nothing.b)

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """Take the slot's extras from `adapter`, dropping what was there."""
        self.release(adapter_slot)
        if not adapter.features:
            return
        self._held[adapter_slot] = []
        tables, keep = self.tables, partial(self._keep, adapter_slot)
        for key, parts in module_extras(adapter, self._spec).items():
            place = key.layer, adapter_slot, TARGETS.index(key.target)
            if parts.weight is not None:
                tables.weights[place] = keep(pack(adapter.replaced[parts.weight]))
            scale = self._scale(adapter, key) if parts.has_scale else None
            if scale is not None:
                tables.scales[place] = keep(whole_panels(scale))
            if parts.has_shift:
                tables.shifts[place] = keep(whole_panels(self._shift(adapter, key, parts, scale)))
        for name in replaced_norms(adapter):
            address = keep(adapter.replaced[name].copy())
            if name == "model.norm.weight":
                tables.final_norm[adapter_slot] = address
            else:
                layer, norm = layer_norm(name)
                tables.norms[layer, adapter_slot, norm] = address
        self._write_embedding(adapter_slot, adapter)
        if "embed_tokens" in adapter.outer:
            a, b = adapter.outer["embed_tokens"]
            tables.embed_a[adapter_slot] = keep(np.array(a.T, order="C"))
            tables.embed_b[adapter_slot], tables.embed_ranks[adapter_slot] = keep(b.copy()), len(b)
        if "lm_head.weight" in adapter.replaced:
            tables.head_weight[adapter_slot] = keep(pack(adapter.replaced["lm_head.weight"]))
        if "lm_head" in adapter.token_rows:
            ids, rows = _sorted_rows(adapter, "lm_head")
            tables.head_ids[adapter_slot], tables.num_head_ids[adapter_slot] = keep(ids), len(ids)
            tables.head_rows[adapter_slot] = keep(pack(rows))
        if "lm_head" in adapter.outer:
            a, b = adapter.outer["lm_head"]
            tables.head_a[adapter_slot], tables.head_b[adapter_slot] = keep(pack(a)), keep(pack(b.T))
            tables.head_ranks[adapter_slot] = len(b)

    def _scale(self, adapter: LoraAdapter, key: LoraKey) -> Floats:
        magnitude, pair = adapter.magnitudes[key], adapter.weights[key]
        return dora_scale(self._team, magnitude, self._base.panels(key), widened(pair.a), widened(pair.b))

    def _shift(self, adapter: LoraAdapter, key: LoraKey, parts: ModuleExtras, scale: Floats | None) -> Floats:
        _, d_out = self._spec.target_shape(key.layer, key.target)
        return module_shift(adapter, key, parts, scale, self._base.bias(key), d_out)


def runs_of(runs: NDArray[np.int64], adapter_slots: Container[int]) -> NDArray[np.int64]:
    """Those of the runs [G, 3] (first, end, adapter slot) that have one of these adapter slots."""
    return runs[[adapter_slot in adapter_slots for adapter_slot in runs[:, 2].tolist()]]


def layer_norm(name: str) -> tuple[int, int]:
    """Layer, and place on the last axis of `ExtraTables.norms`, of a norm weight in a layer."""
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return int(layer), _LAYER_NORMS[module]


def sample_runs(runs: NDArray[np.int64], sample_rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Runs [E, 3] of tokens as runs of the sampled rows among them; sample_rows: [P], ascending."""
    ends = np.searchsorted(sample_rows, runs[:, :2])
    return np.column_stack([ends, runs[:, 2]])[ends[:, 0] < ends[:, 1]].astype(np.int64)


def token_slots(runs: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """[T] adapter slot of each token of the runs [E, 3], and 0 for the others."""
    slots = np.zeros(num_tokens, np.int64)
    for first, end, adapter_slot in runs.tolist():
        slots[first:end] = adapter_slot
    return slots


def _sorted_rows(adapter: LoraAdapter, name: str) -> tuple[NDArray[np.int64], Floats]:
    token_ids, rows = adapter.token_rows[name]
    order = np.argsort(token_ids)
    return np.array(token_ids, np.int64)[order], np.ascontiguousarray(rows[order])


def whole_panels(values: Floats) -> Floats:
    """A vector [n] as a copy, zero-filled to whole panels."""
    out = np.zeros(-(-len(values) // PANEL) * PANEL, np.float32)
    out[: len(values)] = values
    return out
