"""Adapters in the CPU form: rank rows as the CPU kernels read them, and what an adapter has beside them.

In: an adapter, its slot and its rows. Out: arguments of the programs, of shapes that no adapter changes: rank rows,
written by a donated update of one shape per rank class; per slot, where an adapter's rows begin, whether they have two
bytes per value, its ranks, and the addresses of its extras (`app.engine.cpu.extras`), put on the device anew when they
have changed.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey
from app.engine.batch import ForwardBatch
from app.engine.cpu.extras import AdapterExtras, sample_runs, token_slots
from app.engine.cpu.rows import PreparedRows
from app.engine.models.spec import ModelSpec
from app.engine.xla.arrays import TENSOR_AXIS
from app.engine.xla.extra_parts import base_bias
from app.engine.xla.shard_extras import ShardExtras
from app.engine.xla.sizes import GROUP_OF, ROW_PARALLEL, Sizes, shard_columns
from app.engine.xla.weights import Weights
from app.kernels.extras.ffi import packed_tables
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.quantised import Quantised
from app.kernels.matmul.storing import dequantise
from app.kernels.sgmv.cpu import RANK_PANEL, adapter_runs, shrink_tasks
from app.kernels.sgmv.writing import Matrices, WritePlans, matrices, write_plan

Floats = NDArray[np.float32]


class CpuRows(NamedTuple):
    """Rank rows by module, as in `app.kernels.sgmv.cpu`, for all layers: a [L, R / 8, d_in, 8], b [L, R, W].

    With several shards the d_in of o and down and the W of the others are the shards', one after the other.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]


class CpuTables(NamedTuple):
    """starts: [S] int32; in_bf16: [S] bool; ranks: [L, S, 7] int32; extras: `packed_tables` of each shard; head_inputs:
    [shards * 3], see `Adapted`."""

    rows: CpuRows
    starts: Any
    in_bf16: Any
    ranks: Any
    extras: Any
    head_inputs: Any


class CpuAdapters:
    """What the programs are told of resident adapters; the same methods as `XlaAdapters`."""

    def __init__(
        self, spec: ModelSpec, sizes: Sizes, weights: Weights, num_slots: int, max_samples: int, mesh: Mesh
    ) -> None:
        """`max_samples`: rows that a step may sample."""
        self._spec, self._sizes = spec, sizes
        self._columns = shard_columns(spec, sizes.num_shards)
        self._starts, self._in_bf16 = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.bool_)
        self._ranks = np.zeros((sizes.num_layers, num_slots, len(TARGETS)), np.int32)
        self._prepared = PreparedRows(spec)
        self._staging: list[Floats] = [np.empty(0, np.float32)] * sizes.num_shards
        self._team = Team(len(os.sched_getaffinity(0)))
        self._extras: AdapterExtras | ShardExtras
        if sizes.num_shards == 1:
            self._extras = AdapterExtras(spec, _PackedModules(spec, sizes, weights), num_slots, self._team)
        else:
            self._extras = ShardExtras(spec, sizes, weights, num_slots, self._team, mesh)
        self._head_inputs = np.zeros((sizes.num_shards, max_samples, 0), np.float32)
        self._replicated, self._by_shard = NamedSharding(mesh, P()), NamedSharding(mesh, P(TENSOR_AXIS))
        self._places_on_device: tuple[Array, Array, Array] | None = None
        self._extras_on_device: tuple[Array, Array] | None = None

    def warm_up(self, rows: CpuRows) -> None:  # noqa: ARG002
        """Compile what writing an adapter calls."""
        self._extras.warm_up()
        d_in, d_out = self._spec.target_shape(0, TARGETS[0])
        nothing = 0, 0, np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32)
        self._pack([matrices([nothing])], RANK_PANEL)

    def shapes(self, num_rows: int) -> CpuRows:
        """The shape of each table with `num_rows` rank rows."""
        return self._shapes(num_rows, self._sizes.num_shards)

    def specs(self) -> CpuRows:
        """A of o and down is split like their input, B of the others like their output; the rest is replicated."""
        is_row = [GROUP_OF[target] in ROW_PARALLEL for target in TARGETS]
        return CpuRows(
            tuple(P(None, None, TENSOR_AXIS) if row else P() for row in is_row),
            tuple(P() if row else P(None, None, TENSOR_AXIS) for row in is_row),
        )

    def prepare(self, adapter: LoraAdapter) -> None:
        """Any thread: work out what `assign` needs to know. Raises AdapterMismatch for modules that are not here."""
        self._prepared.of(adapter)

    def assign(self, adapter_slot: int, row_start: int, adapter: LoraAdapter, num_rows: int) -> CpuRows:
        """From now on the slot's adapter is this one; its rows, `num_rows` of them, are to be written at `row_start`.

        They are arbitrary where it has none, which nobody reads.
        """
        prepared = self._prepared.of(adapter)
        self._ranks[:, adapter_slot] = prepared.ranks
        sources = [prepared.matrices] if self._sizes.num_shards == 1 else self._split(adapter)
        rows, self._in_bf16[adapter_slot] = self._pack(sources, num_rows)
        self._starts[adapter_slot] = row_start
        self._places_on_device = None
        return rows

    def take_extras(self, adapter_slot: int, row_start: int, adapter: LoraAdapter, rows: CpuRows) -> None:  # noqa: ARG002
        """Keep what the adapter has beside its rank rows, which are in `rows` when it returns."""
        jax.block_until_ready(rows)  # the memory they are read from is the next adapter's, too
        self.release(adapter_slot)
        if adapter.features:
            self._extras.write(adapter_slot, adapter)
            self._extras_on_device = None
        if self._extras.head_width > self._head_inputs.shape[2]:
            self._head_inputs = np.zeros((*self._head_inputs.shape[:2], self._extras.head_width), np.float32)
            self._extras_on_device = None

    def release(self, adapter_slot: int) -> None:
        """Free what the slot's adapter has beside rank rows."""
        if self._extras.held_bytes(adapter_slot):
            self._extras.release(adapter_slot)
            self._extras_on_device = None

    def tables(self, rows: CpuRows) -> CpuTables:
        """The programs' argument."""
        if self._places_on_device is None:
            starts, in_bf16, ranks = self._starts.copy(), self._in_bf16.copy(), self._ranks.copy()  # JAX may keep them
            self._places_on_device = self._put(starts), self._put(in_bf16), self._put(ranks)
        if self._extras_on_device is None:
            packed = [packed_tables(tables) for tables in self._extras.shards]
            inputs = [[part.ctypes.data, part.shape[1]] for part in self._head_inputs]
            scratch = np.array(inputs, np.int64).view(np.int32)[:, :3].reshape(-1)  # an address in two halves, a width
            self._extras_on_device = (
                jax.device_put(np.concatenate(packed), self._by_shard),
                jax.device_put(scratch.copy(), self._by_shard),
            )
        return CpuTables(rows, *self._places_on_device, *self._extras_on_device)

    def fill(self, batch: ForwardBatch, views: dict[str, NDArray[np.int32]]) -> None:
        """Which adapters a step has, in the fields of its bucket."""
        runs = adapter_runs(batch.run_starts, batch.run_adapter_slots)
        extra_runs = self._extras.runs(runs)
        lists = {
            "runs": runs,
            "shrink_tasks": shrink_tasks(runs),
            "extra_runs": extra_runs,
            "extra_samples": sample_runs(extra_runs, batch.sample_rows) if len(extra_runs) else extra_runs,
        }
        for name, lines in lists.items():
            views[name][: len(lines)] = lines
            views[f"num_{name}"][...] = len(lines)
        views["widest"][...] = self._ranks[:, runs[:, 2]].max(initial=0)
        if len(extra_runs):
            count = len(batch.token_ids)
            views["extra_slots"][:count] = token_slots(extra_runs, count)

    def close(self) -> None:
        """End the threads that write adapters."""
        self._team.close()

    def _put(self, array: NDArray[np.int32 | np.bool_]) -> Array:
        placed: Array = jax.device_put(array, self._replicated)
        return placed

    def _module(self, target: str) -> tuple[int, int]:
        """A module's inputs and padded outputs in one shard."""
        group, index = GROUP_OF[target], self._sizes.module_index(target)
        return self._sizes.group_inputs[group], self._sizes.module_widths[group][index]

    def _shapes(self, num_rows: int, shards: int) -> CpuRows:
        """Of the tables of so many shards side by side."""
        a, b = [], []
        for target in TARGETS:
            d_in, width = self._module(target)
            is_row = GROUP_OF[target] in ROW_PARALLEL
            a.append((self._sizes.num_layers, num_rows // RANK_PANEL, d_in * (shards if is_row else 1), RANK_PANEL))
            b.append((self._sizes.num_layers, num_rows, width * (1 if is_row else shards)))
        return CpuRows(tuple(a), tuple(b))

    def _split(self, adapter: LoraAdapter) -> list[Matrices]:
        """Each shard's part of the matrices."""
        shards = []
        for shard in range(self._sizes.num_shards):
            modules = []
            for (layer, target, _), (a, b) in adapter.weights.items():
                mine, is_row = self._columns[target][shard], GROUP_OF[target] in ROW_PARALLEL
                own = (a[:, mine], b) if is_row else (a, b[:, mine])
                modules.append((layer, TARGETS.index(target), *own))
            shards.append(matrices(modules))
        return shards

    def _pack(self, sources: list[Matrices], num_rows: int) -> tuple[CpuRows, bool]:
        """The rows of each shard's matrices, and whether they are bfloat16's: in every shard or in none."""
        parts, plans = [], []
        for shard, source in enumerate(sources):
            a_tables, b_tables = self._staged(shard, num_rows)
            parts.append((a_tables, b_tables))
            plans.append(WritePlans(a_tables, b_tables).plan(source, 0))
        too_fine = np.zeros(1, np.bool_)
        self._team.run(write_plan, 2, np.concatenate(plans), too_fine)
        in_bf16 = not too_fine[0]
        if len(parts) == 1:
            return CpuRows(*(tuple(tables) for tables in parts[0])), in_bf16
        all_a, all_b = [], []
        for n, target in enumerate(TARGETS):
            is_row = GROUP_OF[target] in ROW_PARALLEL
            all_a.append(np.concatenate([part[0][n] for part in parts], axis=2) if is_row else parts[0][0][n])
            all_b.append(parts[0][1][n] if is_row else np.concatenate([part[1][n] for part in parts], axis=2))
        return CpuRows(tuple(all_a), tuple(all_b)), in_bf16

    def _staged(self, shard: int, num_rows: int) -> tuple[list[Floats], list[Floats]]:
        """A shard's rows on their way to the tables: always the same memory, for new pages cost more than writing."""
        own = self._shapes(num_rows, 1)
        shapes = [*own.a, *own.b]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        if len(self._staging[shard]) < ends[-1]:
            self._staging[shard] = _aligned(ends[-1])
        flat = np.split(self._staging[shard][: ends[-1]], ends[:-1])
        tables = [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]
        return tables[: len(TARGETS)], tables[len(TARGETS) :]


def _aligned(num_floats: int) -> Floats:
    """Memory for as many at an address that XLA reads from in place: a multiple of 64."""
    memory = np.empty(num_floats + 16, np.float32)
    first = -memory.ctypes.data // 4 % 16
    return memory[first : first + num_floats]


def write_rows(tables: CpuRows, rows: CpuRows, row_start: Array) -> CpuRows:
    """The tables with `rows` at `row_start`; donated, so written in place."""
    panel = row_start // RANK_PANEL
    return CpuRows(
        tuple(lax.dynamic_update_slice_in_dim(*pair, panel, axis=1) for pair in zip(tables.a, rows.a, strict=True)),
        tuple(lax.dynamic_update_slice_in_dim(*pair, row_start, axis=1) for pair in zip(tables.b, rows.b, strict=True)),
    )


class _PackedModules:
    """The base's modules for `AdapterExtras`; views of the arrays on the device, which is this CPU. One shard only."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, weights: Weights) -> None:
        self._spec, self._sizes, self._layers = spec, sizes, weights.layers
        self._shard_columns = shard_columns(spec, sizes.num_shards)

    def panels(self, key: LoraKey) -> Floats:
        group, first = GROUP_OF[key.target], self._sizes.first_column(key.target)
        _, d_out = self._spec.target_shape(key.layer, key.target)
        columns = slice(first // PANEL, -(-(first + d_out) // PANEL))
        stack = jax.tree.map(lambda array: np.asarray(array)[key.layer, columns], getattr(self._layers, group))
        return dequantise(stack) if isinstance(stack, Quantised) else stack

    def bias(self, key: LoraKey) -> Floats | None:
        return base_bias(self._layers, self._spec, self._sizes, self._shard_columns, key)
