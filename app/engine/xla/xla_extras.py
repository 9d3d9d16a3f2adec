"""What resident adapters hold beside rank rows, in the forms other than the CPU's.

In: an adapter and its slot, when it is written; a step's batch. Out: `OwnTables` for the programs, of one shape
whatever adapters hold, and which rows of a step need them. What can be computed once is computed here, as on the CPU
(`app.kernels.extras.reference` is the definition).
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.adapters.extras import embedding_ids
from app.engine.adapters.lora import TARGETS, LoraAdapter
from app.engine.batch import ForwardBatch
from app.engine.cpu.extras import runs_of, sample_runs
from app.engine.models.spec import ModelSpec
from app.engine.xla.arrays import AdapterTables
from app.engine.xla.dora_scales import DoraScales
from app.engine.xla.extra_memory import ExtraMemory
from app.engine.xla.extra_parts import BaseValues, base_bias, counts_of, parts_of
from app.engine.xla.sizes import Sizes, shard_columns
from app.engine.xla.weights import Weights
from app.kernels.extras import xla as own
from app.kernels.extras.xla import OwnTables, own_segments, read_beyond
from app.kernels.sgmv.cpu import adapter_runs


class XlaExtras:
    """Memory, and tables of what lies where in it."""

    def __init__(
        self, spec: ModelSpec, sizes: Sizes, weights: Weights, num_slots: int, max_bytes: int, mesh: Mesh
    ) -> None:
        """Takes `max_bytes` of every device. Raises ConfigError for more than indices can reach."""
        assert spec.vocab_size < 1 << 24, "token ids are kept as floats"
        self._spec, self._sizes, self._layers = spec, sizes, weights.layers
        self._columns = shard_columns(spec, sizes.num_shards)
        widest = max(*sizes.group_inputs.values(), *sizes.group_widths.values())
        self._memory = ExtraMemory(max_bytes, read_beyond(spec.hidden_size, spec.vocab_size, widest), mesh)
        self._scales = DoraScales(spec, sizes, weights.layers, mesh)
        self._tables = {
            "modules": np.zeros((sizes.num_layers, num_slots, len(TARGETS), 3), np.int32),
            "norms": np.zeros((sizes.num_layers, num_slots, 4), np.int32),
            "slots": np.zeros((num_slots, own.NUM_PLACES + 3), np.int32),
        }
        self._held: dict[int, NDArray[np.int64] | None] = {}  # by slot, the ids of its embedding rows
        self._replicated = NamedSharding(mesh, P())
        self._on_device: tuple[Array, Array, Array] | None = None

    def warm_up(self, rows: AdapterTables) -> None:
        """Compile what `write` calls."""
        self._memory.warm_up()
        self._scales.warm_up(rows)

    def write(self, adapter_slot: int, adapter: LoraAdapter, row_start: int, rows: AdapterTables) -> None:
        """Take the slot's extras from `adapter`, dropping what was there. rows: with the adapter's written.

        Raises AdapterTooLarge if there is no room for them.
        """
        self.release(adapter_slot)
        if not adapter.features:
            return
        bias = partial(base_bias, self._layers, self._spec, self._sizes, self._columns)
        base = BaseValues(self._scales.of(adapter, row_start, rows), bias)
        parts = list(parts_of(adapter, self._spec, self._sizes, base))
        places, moves = self._memory.write(adapter_slot, [part.array for part in parts])
        for move in moves:
            for name, table in self._tables.items():
                entries = _of_slot(table, move.adapter_slot)
                entries = entries[: own.NUM_PLACES] if name == "slots" else entries
                entries[entries > 0] -= move.source - move.target
        for part, place in zip(parts, places, strict=True):
            layer = () if part.layer is None else (part.layer,)
            self._tables[part.table][*layer, adapter_slot, *part.entry] = place
        for column, count in counts_of(adapter).items():
            self._tables["slots"][adapter_slot, column] = count
        self._held[adapter_slot] = embedding_ids(adapter)
        self._on_device = None

    def release(self, adapter_slot: int) -> None:
        """Forget the slot's extras."""
        if adapter_slot in self._held:
            del self._held[adapter_slot]
            self._memory.release(adapter_slot)
            for table in self._tables.values():
                _of_slot(table, adapter_slot)[...] = 0
            self._on_device = None

    def tables(self) -> OwnTables:
        """The programs' argument."""
        if self._on_device is None:
            copies = (self._tables[name].copy() for name in ("modules", "norms", "slots"))  # JAX may keep them
            modules, norms, slots = (jax.device_put(table, self._replicated) for table in copies)
            self._on_device = modules, norms, slots
        return OwnTables(self._memory.array, *self._on_device)

    def fill(self, batch: ForwardBatch, views: dict[str, NDArray[np.int32]]) -> None:
        """Which rows of a step have something of their own, in the fields of its bucket."""
        if not self._held:
            return
        runs = runs_of(adapter_runs(batch.run_starts, batch.run_adapter_slots), self._held)
        if not len(runs):
            return
        samples = sample_runs(runs, batch.sample_rows)
        views["num_own_segments"][...] = own_segments(runs, views["own_segments"])
        views["num_own_samples"][...] = own_segments(samples, views["own_samples"])
        for first, end, adapter_slot in runs.tolist():
            place = int(self._tables["slots"][adapter_slot, own.EMBED_ROWS])
            if place:
                views["embed_places"][first:end] = self._embedding_places(
                    place, self._held[adapter_slot], batch.token_ids[first:end]
                )

    def _embedding_places(
        self, place: int, own_ids: NDArray[np.int64] | None, token_ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Where each token's own row lies, 0 for none. own_ids: of the rows from `place` on; None for every token's."""
        if own_ids is None:
            return place + token_ids.astype(np.int64) * self._spec.hidden_size
        is_own = own_ids[None] == token_ids[:, None]  # [T, n]
        return np.where(is_own.any(axis=1), place + is_own.argmax(axis=1) * self._spec.hidden_size, 0)


def _of_slot(table: NDArray[np.int32], adapter_slot: int) -> NDArray[np.int32]:
    """The slot's entries of [L, S, ...] or [S, n]: a view."""
    return table[adapter_slot] if table.ndim == 2 else table[:, adapter_slot]
