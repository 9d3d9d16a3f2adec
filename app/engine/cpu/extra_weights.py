"""Extra weights of resident adapters on a CPU: where each of them lies in memory.

Memory is allocated when an adapter is written and freed when its slot is released; `ExtraTables` hold the addresses for
the kernels. The engine limits the total (`AdapterCard.extra_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair, to_float32
from app.engine.adapters.extra_weights import ExtraWeight, extra_weights
from app.engine.cpu.weights import PackedModules
from app.engine.models.linear_modules import shared_table_modules, stacked_modules, target_shape, targets_of
from app.engine.models.spec import ModelSpec
from app.kernels.dora.cpu import dora_scale
from app.kernels.extra_weights.cpu import ATTENTION_NORM, K_NORM, MLP_NORM, Q_NORM, empty_tables
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import PANEL, pack

Floats = NDArray[np.float32]

#: Indices on the last axis of `ExtraTables.norms`.
_NORMS = {"attention_norm": ATTENTION_NORM, "mlp_norm": MLP_NORM, "q_norm": Q_NORM, "k_norm": K_NORM}
_NORMS |= {"query_latent_norm": Q_NORM, "latent_norm": K_NORM}


class AdapterExtras:
    """Arrays by adapter slot, and their addresses in tables."""

    def __init__(self, spec: ModelSpec, base: PackedModules, max_loras: int, team: ThreadTeam) -> None:
        self._spec, self._base, self._team = spec, base, team
        self._targets = targets_of(shared_table_modules(stacked_modules(spec)))
        self._held: dict[int, list[NDArray[np.generic]]] = {}
        self.tables = empty_tables(len(spec.layers), max_loras, len(self._targets))
        #: [S], the tokens of each slot's adapter.
        self.vocab_sizes = np.full(max_loras, spec.vocab_size, np.int64)
        self.has_resized = False

    def release(self, adapter_slot: int) -> None:
        """Free the slot's extra weights."""
        self._set_vocab_size(adapter_slot, self._spec.vocab_size)
        if self._held.pop(adapter_slot, None) is not None:
            for table in self.tables:
                table[(slice(None),) * (table.ndim > 1) + (adapter_slot,)] = 0

    @property
    def head_width(self) -> int:
        """The width that `extra_head_inputs` needs for any resident adapter."""
        panels = -(-self.tables.num_head_ids // PANEL) - (-self.tables.head_ranks // PANEL)
        return int(np.max(panels)) * PANEL

    def runs(self, runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The runs [G, 3] (first, end, adapter slot) whose adapter has extra weights."""
        return runs[[adapter_slot in self._held for adapter_slot in runs[:, 2].tolist()]]

    def warm_up(self) -> None:
        """Compile what `write` calls, on throwaway weights."""
        key = LoraKey(0, self._targets[0])
        d_in, d_out = target_shape(self._spec, *key[:2])
        nothing = LoraPair(np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32))
        self.dora_scale(key, nothing.b[0], nothing)

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """Replace the slot's extra weights by those of `adapter`."""
        self.release(adapter_slot)
        self._set_vocab_size(adapter_slot, adapter.card.vocab_size or self._spec.vocab_size)
        for part in extra_weights(adapter, self._spec, self):
            self._place(adapter_slot, part)

    def appended_logits(self, adapter_slot: int, inputs: Floats) -> Floats:
        """The logits of the adapter's tokens that the base lacks. inputs: its row of `extra_head_inputs` [W]."""
        num_rows = int(self.tables.num_head_ids[adapter_slot])
        num_appended = int(self.vocab_sizes[adapter_slot]) - self._spec.vocab_size
        return inputs[num_rows - num_appended : num_rows]

    def _set_vocab_size(self, adapter_slot: int, vocab_size: int) -> None:
        self.vocab_sizes[adapter_slot] = vocab_size
        self.has_resized = bool((self.vocab_sizes != self._spec.vocab_size).any())

    def dora_scale(self, key: LoraKey, magnitude: Floats, pair: LoraPair) -> Floats:
        """See `BaseWeights.dora_scale`."""
        return dora_scale(self._team, magnitude, self._base.panels(key), to_float32(pair.a), to_float32(pair.b))

    def bias(self, key: LoraKey) -> Floats | None:
        """See `BaseWeights.bias`."""
        return self._base.bias(key)

    def _place(self, adapter_slot: int, part: ExtraWeight) -> None:
        array = _LAYOUTS.get(part.kind, _copy)(part.values)
        self._held.setdefault(adapter_slot, []).append(array)
        address = array.ctypes.data
        if part.target is not None:
            table = getattr(self.tables, f"{part.kind}s")
            table[part.layer, adapter_slot, self._targets.index(part.target)] = address
        elif part.layer is not None:
            self.tables.norms[part.layer, adapter_slot, _NORMS[part.kind]] = address
        else:
            getattr(self.tables, part.kind)[adapter_slot] = address
            if part.kind in _COUNTS:
                getattr(self.tables, _COUNTS[part.kind])[adapter_slot] = len(part.values)


def sample_runs(runs: NDArray[np.int64], sample_rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Runs [E, 3] of tokens as runs of the sampled rows among them; sample_rows: [P], ascending."""
    ends = np.searchsorted(sample_rows, runs[:, :2])
    return np.column_stack([ends, runs[:, 2]])[ends[:, 0] < ends[:, 1]].astype(np.int64)


def token_slots(runs: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """[T] adapter slot of each token of the runs [E, 3], 0 for the others."""
    slots = np.zeros(num_tokens, np.int64)
    for first, end, adapter_slot in runs.tolist():
        slots[first:end] = adapter_slot
    return slots


def _whole_panels(values: Floats) -> Floats:
    """A vector [n] as a copy, zero-filled to whole panels."""
    out = np.zeros(-(-len(values) // PANEL) * PANEL, np.float32)
    out[: len(values)] = values
    return out


def _copy(values: NDArray[Any]) -> NDArray[Any]:
    """A copy in this engine's memory: an adapter's array may be another process's."""
    return np.array(values, order="C")


#: The memory layout of a part, where it differs from the adapter's.
_LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "weight": pack,
    "scale": _whole_panels,
    "shift": _whole_panels,
    "head_weight": pack,
    "head_rows": pack,
    "head_a": pack,
    "head_b": lambda b: pack(b.T),
}
#: The table with the length of a part.
_COUNTS = {"embed_ids": "num_embed_ids", "embed_b": "embed_ranks", "head_ids": "num_head_ids", "head_b": "head_ranks"}
