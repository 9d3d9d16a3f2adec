"""Adapter tables of the forms other than the CPU's: their shapes, an adapter's rows in that shape, and the write.

In: a `LoraAdapter` and a rank class. Out: rows of one fixed shape per class, zero wherever the adapter has
nothing (modules it leaves alone, rows beyond a module's rank), so that a write erases what was there before.
A class is `RANK_CHUNK` times a power of two, like the runs of rank rows the engine hands out.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraAdapter
from app.engine.batch import ForwardBatch
from app.engine.errors import AdapterMismatch
from app.engine.models.spec import ModelSpec
from app.engine.xla.arrays import TENSOR_AXIS, AdapterTables, XlaTables
from app.engine.xla.sizes import GROUP_OF, GROUPS, ROW_PARALLEL, Sizes, shard_columns
from app.engine.xla.weights import Weights
from app.engine.xla.xla_extras import XlaExtras
from app.kernels.sgmv.xla import RANK_CHUNK, segment_arrays


def rank_classes(num_rows: int) -> list[int]:
    """Lengths of the runs an adapter can own, shortest first."""
    return [RANK_CHUNK << k for k in range(32) if RANK_CHUNK << k <= num_rows]


class XlaAdapters:
    """What the programs are told of resident adapters: their rank rows, and which segments of tokens are theirs."""

    def __init__(
        self, spec: ModelSpec, sizes: Sizes, weights: Weights, num_slots: int, extra_bytes: int, mesh: Mesh
    ) -> None:
        """`extra_bytes`: taken of every device for what adapters have beside rank rows; none, and they are refused."""
        self._spec, self._sizes = spec, sizes
        self._row_starts, self._ranks = (np.zeros(num_slots, np.int32) for _ in range(2))
        self._extras = XlaExtras(spec, sizes, weights, num_slots, extra_bytes, mesh) if extra_bytes else None

    def warm_up(self, rows: AdapterTables) -> None:
        """Compile what writing an adapter calls."""
        if self._extras is not None:
            self._extras.warm_up(rows)

    def shapes(self, num_rows: int) -> AdapterTables:
        """The shape of each table with `num_rows` rank rows."""
        sizes = self._sizes
        shapes: dict[str, tuple[int, ...]] = {}
        for group, modules in GROUPS.items():
            d_in, d_out = sizes.group_inputs[group], sum(sizes.group_outputs[group])
            is_row, shards = group in ROW_PARALLEL, sizes.num_shards
            shapes[f"a_{group}"] = (sizes.num_layers, num_rows, shards * d_in if is_row else len(modules) * d_in)
            shapes[f"b_{group}"] = (sizes.num_layers, num_rows, d_out if is_row else shards * d_out)
        return AdapterTables(**shapes)

    def specs(self) -> AdapterTables:
        """A of o and down is split like their input, B of the others like their output; the rest is replicated."""
        split = P(None, None, TENSOR_AXIS)
        return AdapterTables(
            a_qkv=P(), a_o=split, a_gate_up=P(), a_down=split, b_qkv=split, b_o=P(), b_gate_up=split, b_down=P()
        )

    def _rows_of(self, adapter: LoraAdapter, num_rows: int) -> AdapterTables:
        """As NumPy arrays in the tables' layout, zero where it has nothing."""
        sizes = self._sizes
        arrays: dict[str, NDArray[np.float32]] = {
            name: np.zeros(shape, np.float32) for name, shape in self.shapes(num_rows)._asdict().items()
        }
        columns = shard_columns(self._spec, sizes.num_shards)
        for key, pair in adapter.weights.items():
            group, module = GROUP_OF[key.target], sizes.module_index(key.target)
            a, b = arrays[f"a_{group}"], arrays[f"b_{group}"]
            mine, rank = columns[key.target], pair.rank
            a = a.reshape(sizes.num_layers, num_rows, len(GROUPS[group]), -1).swapaxes(1, 2)  # a view
            a[key.layer, module, :rank] = pair.a[:, mine.reshape(-1)] if group in ROW_PARALLEL else pair.a
            if group in ROW_PARALLEL:
                b[key.layer, :rank] = pair.b
            else:
                start = sum(sizes.group_outputs[group][:module])
                by_shard = b[key.layer].reshape(num_rows, sizes.num_shards, -1)  # a view
                by_shard[:rank, :, start : start + mine.shape[1]] = pair.b[:, mine]
        return AdapterTables(**arrays)

    def prepare(self, adapter: LoraAdapter) -> None:
        """Any thread: raises AdapterMismatch for modules that are not here."""
        adapter.check_modules(GROUP_OF, self._sizes.num_layers)

    def assign(self, adapter_slot: int, row_start: int, adapter: LoraAdapter, num_rows: int) -> AdapterTables:
        """From now on the slot's adapter is this one; its rows, `num_rows` of them, are to be written at `row_start`.

        Raises AdapterMismatch for one that is not plain LoRA where those are refused.
        """
        if adapter.features and self._extras is None:
            features = " or ".join(sorted(adapter.features))
            raise AdapterMismatch(f"the JAX engine with engine.adapter_extra_bytes 0 cannot apply {features}; raise it")
        self._row_starts[adapter_slot] = row_start
        self._ranks[adapter_slot] = max((pair.rank for pair in adapter.weights.values()), default=0)
        return self._rows_of(adapter, num_rows)

    def take_extras(self, adapter_slot: int, row_start: int, adapter: LoraAdapter, rows: AdapterTables) -> None:
        """Write what the adapter has beside its rank rows, which `rows` have by now.

        Raises AdapterTooLarge if there is no room for it.
        """
        if self._extras is not None:
            self._extras.write(adapter_slot, adapter, row_start, rows)

    def release(self, adapter_slot: int) -> None:
        """Free what the slot's adapter has beside rank rows."""
        if self._extras is not None:
            self._extras.release(adapter_slot)

    def tables(self, rows: AdapterTables) -> XlaTables:
        """The programs' argument."""
        return XlaTables(rows, None if self._extras is None else self._extras.tables())

    def fill(self, batch: ForwardBatch, views: dict[str, NDArray[np.int32]]) -> None:
        """Which adapters a step has, in the fields of its bucket."""
        views["num_segments"][...] = segment_arrays(
            batch.run_starts, batch.run_adapter_slots, self._row_starts, self._ranks, views["segments"]
        )
        if self._extras is not None:
            self._extras.fill(batch, views)

    def close(self) -> None:
        """Nothing is held."""


def write_rows(tables: AdapterTables, rows: AdapterTables, row_start: Array) -> AdapterTables:
    """The tables with `rows` at `row_start`; donated, so written in place. Rows are the last axis but one."""
    return jax.tree.map(
        lambda table, new: lax.dynamic_update_slice_in_dim(table, new, row_start, axis=table.ndim - 2), tables, rows
    )
