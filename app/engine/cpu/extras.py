"""What resident adapters hold beside their rank rows, on a CPU: where each part of an adapter's plan lies in memory.

In: an adapter and its slot, when it is written. Out: `ExtraTables` for the kernels, and the runs of a step that need
them. Memory is allocated per adapter and freed when its slot is released; how much may be held is the engine's
business (`AdapterCard.extra_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.extras import ExtraPart, embedding_ids, embedding_rows, plan
from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey, LoraPair, widened
from app.engine.models.names import LAYER_NORMS
from app.engine.models.products import targets_of, uniform_products
from app.engine.models.spec import ModelSpec
from app.kernels.dora.cpu import dora_scale
from app.kernels.extras.cpu import ATTENTION_NORM, K_NORM, MLP_NORM, Q_NORM, ExtraTables, empty_tables
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL, pack

Floats = NDArray[np.float32]

#: Places on the last axis of `ExtraTables.norms`.
_NORMS = {"attention_norm": ATTENTION_NORM, "mlp_norm": MLP_NORM, "q_norm": Q_NORM, "k_norm": K_NORM}


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
        self._spec, self._base, self._team = spec, base, team
        self._targets = targets_of(uniform_products(spec))

    @property
    def tables(self) -> ExtraTables:
        """The only shard's."""
        return self.shards[0]

    def warm_up(self) -> None:
        """Compile what `write` calls, on weights of no consequence."""
        key = LoraKey(0, self._targets[0])
        d_in, d_out = self._spec.target_shape(*key[:2])
        nothing = LoraPair(np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32))
        self.dora_scale(key, nothing.b[0], nothing)

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """Take the slot's extras from `adapter`, dropping what was there."""
        self.release(adapter_slot)
        for part in plan(adapter, self._spec, self):
            self._held.setdefault(adapter_slot, [])
            self._place(adapter_slot, part)

    def dora_scale(self, key: LoraKey, magnitude: Floats, pair: LoraPair) -> Floats:
        """See `BaseValues.dora_scale`."""
        return dora_scale(self._team, magnitude, self._base.panels(key), widened(pair.a), widened(pair.b))

    def bias(self, key: LoraKey) -> Floats | None:
        """See `BaseValues.bias`."""
        return self._base.bias(key)

    def _place(self, adapter_slot: int, part: ExtraPart) -> None:
        address = self._keep(adapter_slot, _LAYOUTS.get(part.kind, _copy)(part.values))
        if part.target is not None:
            table = getattr(self.tables, f"{part.kind}s")
            table[part.layer, adapter_slot, self._targets.index(part.target)] = address
        elif part.layer is not None:
            self.tables.norms[part.layer, adapter_slot, _NORMS[part.kind]] = address
        else:
            getattr(self.tables, part.kind)[adapter_slot] = address
            if part.kind in _COUNTS:
                getattr(self.tables, _COUNTS[part.kind])[adapter_slot] = len(part.values)


def runs_of(runs: NDArray[np.int64], adapter_slots: Container[int]) -> NDArray[np.int64]:
    """Those of the runs [G, 3] (first, end, adapter slot) that have one of these adapter slots."""
    return runs[[adapter_slot in adapter_slots for adapter_slot in runs[:, 2].tolist()]]


def layer_norm(name: str) -> tuple[int, int]:
    """Layer, and place on the last axis of `ExtraTables.norms`, of a norm weight in a layer."""
    _, _, layer, path = name.removesuffix(".weight").split(".", 3)
    return int(layer), _NORMS[next(norm for norm, where in LAYER_NORMS.items() if where == path)]


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


def whole_panels(values: Floats) -> Floats:
    """A vector [n] as a copy, zero-filled to whole panels."""
    out = np.zeros(-(-len(values) // PANEL) * PANEL, np.float32)
    out[: len(values)] = values
    return out


def _copy(values: NDArray[Any]) -> NDArray[Any]:
    """The slot's own memory: an adapter's may be another process's."""
    return np.array(values, order="C")


#: How a part lies in memory, where not as it is.
_LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "weight": pack,
    "scale": whole_panels,
    "shift": whole_panels,
    "head_weight": pack,
    "head_rows": pack,
    "head_a": pack,
    "head_b": lambda b: pack(b.T),
}
#: Where the length of a part is told, too.
_COUNTS = {"embed_ids": "num_embed_ids", "embed_b": "embed_ranks", "head_ids": "num_head_ids", "head_b": "head_ranks"}
