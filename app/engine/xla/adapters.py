"""Resident adapters on the devices: LoRA rows, scales and shifts in tables whose shapes no adapter changes.

An adapter's rows have one fixed shape per rank class, with zeros where it has nothing, and are written by a donated
update. A class is `RANK_CHUNK` times a power of two, like the runs of rank rows that the engine hands out. An adapter
may also have a scale and a shift per column of any module (DoRA, biases): every run of rank rows has room for them.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair, to_float32, unknown_module
from app.engine.adapters.extra_weights import ExtraWeight, extra_weights
from app.engine.adapters.features import ACTIVATED, XLA_FEATURES
from app.engine.batch import ForwardBatch
from app.engine.errors import AdapterMismatch
from app.engine.models.linear_modules import linear_module_of
from app.engine.models.sharding import shard_columns
from app.engine.xla.arrays import SHARD_AXES, AdapterPlaces, ExpertPages, Floats, RankTables, XlaWeights
from app.engine.xla.base_weights import XlaBaseWeights
from app.engine.xla.moe_lora_tables import XlaMoeLoraTables
from app.engine.xla.sizes import XlaSizes
from app.engine.xla.step import StepAdapters
from app.kernels.sgmv.xla import RANK_CHUNK


def rank_classes(num_rows: int) -> list[int]:
    """Possible lengths of an adapter's run of rank rows, shortest first."""
    return [RANK_CHUNK << k for k in range(32) if RANK_CHUNK << k <= num_rows]


class XlaAdapters:
    """Tables of resident adapters: the programs' arguments, and the arrays to write."""

    def __init__(
        self, sizes: XlaSizes, weights: XlaWeights, num_slots: int, num_rows: int, extra_bytes: int, mesh: Mesh
    ) -> None:
        """extra_bytes: the bound of adapters' extra weights; with 0, adapters with scales, shifts or deltas of experts
        are refused.
        """
        self._sizes, self._num_rows = sizes, num_rows
        self._columns = {module.name: shard_columns(module, sizes.shards_of(module)) for module in sizes.whole}
        self._base = XlaBaseWeights(sizes, weights.layers, mesh) if extra_bytes and num_rows else None
        self.experts = XlaMoeLoraTables(sizes, num_slots, extra_bytes)
        self._extra_weights: WeakKeyDictionary[LoraAdapter, tuple[ExtraWeight, ...]] = WeakKeyDictionary()
        self._starts, self._max_ranks = (np.zeros(num_slots, np.int32) for _ in range(2))
        self._has_extras = np.zeros(num_slots, np.bool_)
        self._ranks = {
            module.name: np.zeros((len(sizes.layers_of(module.name)), num_slots, len(module.targets)), np.int32)
            for module in sizes.single
        }
        self._replicated = NamedSharding(mesh, P())
        self._on_device: AdapterPlaces | None = None

    def warm_up(self) -> None:
        """Compile the programs that `prepare` calls."""
        if self._base is not None:
            self._base.warm_up()

    def shapes(self, num_rows: int) -> RankTables:
        """The shape of each table with `num_rows` rank rows of one adapter."""
        return self._shapes(num_rows, 1)

    def table_shapes(self) -> RankTables:
        """The shape of each table with all rank rows."""
        shapes = self._shapes(self._num_rows, self._base_row + 1)
        experts = self.experts
        return shapes._replace(experts=experts.shapes(experts.num_pages) if experts.num_pages else None)

    def _shapes(self, num_rows: int, num_extra_rows: int) -> RankTables:
        sizes = self._sizes
        a, b, extras = {}, {}, {}
        for module in sizes.single:
            is_input, count = module.kind.split == "input", len(sizes.layers_of(module.name))
            if module.has_rank_rows:
                extras[module.name] = (count, num_extra_rows, sizes.total_width(module))
            for target, width in zip(module.targets, module.widths, strict=True):
                a[target] = (count, num_rows, module.d_in * (sizes.num_shards if is_input else 1))
                b[target] = (count, num_rows, width * (1 if is_input else sizes.num_shards))
        if self._base is None:
            extras = {}
        return RankTables(a, b, extras, dict(extras))

    def specs(self) -> RankTables:
        """PartitionSpecs: A of o and down is split like their input, B of the others like their output; the rest is
        replicated.
        """
        split, a, b, extras = P(None, None, SHARD_AXES), {}, {}, {}
        for module in self._sizes.single:
            is_input = module.kind.split == "input"
            for target in module.targets:
                a[target], b[target] = (split, P()) if is_input else (P(), split)
            if module.has_rank_rows:
                extras[module.name] = P() if is_input else split
        if self._base is None:
            extras = {}
        return RankTables(a, b, extras, dict(extras), self.experts.specs() if self.experts.num_pages else None)

    def prepare(self, adapter: LoraAdapter) -> None:
        """Check an adapter and compute the scales of DoRA. Any thread. Raises AdapterMismatch for an unsupported
        feature.
        """
        self._check_modules(adapter)
        beyond = adapter.features - {ACTIVATED}
        if not beyond:
            return
        refused = " or ".join(sorted(beyond - XLA_FEATURES))
        if refused:
            raise AdapterMismatch(f"the xla engine does not serve {refused}; use engine.cpu or engine.cuda")
        features = " or ".join(sorted(beyond))
        if self._base is None:
            raise AdapterMismatch(f"the xla engine with engine.extra_weights_bytes 0 cannot apply {features}; raise it")
        if all(key.expert is not None for key in adapter.weights):
            raise AdapterMismatch(
                f"the xla engine applies {features} besides rank rows only, and this adapter has none; use engine.cpu"
            )
        if adapter not in self._extra_weights:
            self._extra_weights[adapter] = extra_weights(adapter, self._sizes.spec, self._base)

    def rows_of(self, adapter: LoraAdapter, num_rows: int) -> RankTables:
        """A prepared adapter's rows to write: NumPy arrays in the tables' layout."""
        sizes, shards = self._sizes, self._sizes.num_shards
        shapes = self.shapes(num_rows)
        a: dict[str, Floats] = {}
        b: dict[str, Floats] = {}  # [L, shards, floats]; one shard for replicated tables
        for module in sizes.single:
            is_input = module.kind.split == "input"
            for target in module.targets:
                for table, shape, is_split in ((a, shapes.a, is_input), (b, shapes.b, not is_input)):
                    parts, floats = shards if is_split else 1, num_rows * shape[target][2]
                    table[target] = np.zeros((shape[target][0], parts, floats // parts), np.float32)
        for (layer, target, _), pair in _single(adapter):
            module = linear_module_of(sizes.single, target)
            stacked_layer = sizes.stacked_layer(module.name, layer)
            wide_a, wide_b = to_float32(pair.a), to_float32(pair.b)
            for shard, columns in enumerate(self._columns[module.name][target]):
                own_a = wide_a[:, columns] if module.kind.split == "input" else wide_a
                own_b = wide_b[:, columns] if module.kind.split == "output" else wide_b
                for whole, rows in ((a[target], own_a), (b[target], own_b)):
                    whole[stacked_layer, min(shard, whole.shape[1] - 1), : rows.size] = rows.reshape(-1)
        whole_a, whole_b = (
            {target: _side_by_side(part, num_rows) for target, part in table.items()} for table in (a, b)
        )
        return RankTables(whole_a, whole_b, *self._extras_of(adapter))

    def assign(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """Record that the slot holds this adapter, with its rows from `row_start` on."""
        for table in self._ranks.values():
            table[:, adapter_slot] = 0
        for (layer, target, _), pair in _single(adapter):
            module = linear_module_of(self._sizes.single, target)
            stacked_layer = self._sizes.stacked_layer(module.name, layer)
            self._ranks[module.name][stacked_layer, adapter_slot, module.targets.index(target)] = pair.rank
        self._starts[adapter_slot] = row_start
        self._max_ranks[adapter_slot] = max((pair.rank for _, pair in _single(adapter)), default=0)
        self._has_extras[adapter_slot] = bool(adapter.features - {ACTIVATED})
        self._on_device = None

    def release(self, adapter_slot: int) -> None:
        """Free the slot's pages."""
        self.experts.release(adapter_slot)
        self._on_device = None

    def places(self) -> AdapterPlaces:
        """The tables' locations and ranks as the programs' argument."""
        if self._on_device is None:
            ranks = {name: table.copy() for name, table in self._ranks.items()}
            copied = AdapterPlaces(self._starts.copy(), ranks, self.experts.places())
            self._on_device = jax.device_put(copied, self._replicated)  # JAX may keep the arrays that it is given
        return self._on_device

    def of_step(self, batch: ForwardBatch) -> StepAdapters:
        """A step's adapters, as `pack` takes them."""
        slots, counts = batch.run_adapter_slots, np.diff(batch.run_starts)
        rows = np.where(self._max_ranks[slots] > 0, self._starts[slots] // RANK_CHUNK, self._base_row)
        pages = self.experts.longest(slots)
        return StepAdapters(
            int(self._max_ranks[slots].max(initial=0)),
            np.repeat(rows, counts).astype(np.int32),
            int(counts[self._has_extras[slots]].sum()),
            np.repeat(np.where(pages > 0, slots, 0), counts).astype(np.int32),
            int(pages.max(initial=0)),
        )

    def _check_modules(self, adapter: LoraAdapter) -> None:
        for key in adapter.weights:
            found = [module for module in self._sizes.modules if key.target in module.targets]
            if not found or key.expert not in found[0].experts or key.layer not in self._sizes.layers_of(found[0].name):
                raise unknown_module(key)
        self.experts.check(adapter)

    @property
    def _base_row(self) -> int:
        """The base model's row in the tables of scales and shifts."""
        return self._num_rows // RANK_CHUNK

    def _extras_of(self, adapter: LoraAdapter) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Scales and shifts by module [L, 1, columns of all shards]: 1 and 0 where the adapter has none."""
        shapes = self.shapes(RANK_CHUNK)
        scales = {name: np.ones(shape, np.float32) for name, shape in shapes.scales.items()}
        shifts = {name: np.zeros(shape, np.float32) for name, shape in shapes.shifts.items()}
        for kind, layer, target, values in self._extra_weights.get(adapter, ()):
            assert kind in ("scale", "shift")
            assert target is not None
            assert layer is not None
            module = linear_module_of(self._sizes.single, target)
            stacked_layer = self._sizes.stacked_layer(module.name, layer)
            table = (scales if kind == "scale" else shifts)[module.name][stacked_layer, 0]
            columns = module.columns(target)
            if module.kind.split == "input":
                table[columns] = values
            else:
                by_shard = table.reshape(self._sizes.num_shards, -1)  # a view
                by_shard[:, columns] = values[self._columns[module.name][target]]
        return scales, shifts


def _single(adapter: LoraAdapter) -> list[tuple[LoraKey, LoraPair]]:
    """The adapter's weights outside of experts."""
    return [(key, pair) for key, pair in adapter.weights.items() if key.expert is None]


def base_tables(shapes: RankTables) -> RankTables:
    """Tables of these shapes without adapters, as NumPy arrays."""
    a, b, shifts = (
        {name: np.zeros(shape, np.float32) for name, shape in table.items()}
        for table in (shapes.a, shapes.b, shapes.shifts)
    )
    scales = {name: np.ones(shape, np.float32) for name, shape in shapes.scales.items()}
    if shapes.experts is None:
        return RankTables(a, b, scales, shifts)
    pages = ({name: np.zeros(shape, np.float32) for name, shape in table.items()} for table in shapes.experts)
    return RankTables(a, b, scales, shifts, ExpertPages(*pages))


def write_rows(tables: RankTables, rows: RankTables, row_start: Array) -> RankTables:
    """The tables with an adapter's rows at `row_start`; donated, so written in place."""

    def update(table: dict[str, Array], new: dict[str, Array], at: Array) -> dict[str, Array]:
        return {name: lax.dynamic_update_slice_in_dim(table[name], new[name], at, axis=1) for name in table}

    extra_row = row_start // RANK_CHUNK
    return RankTables(
        update(tables.a, rows.a, row_start), update(tables.b, rows.b, row_start),
        update(tables.scales, rows.scales, extra_row), update(tables.shifts, rows.shifts, extra_row), tables.experts,
    )  # fmt: skip


def _side_by_side(by_shard: Floats, num_rows: int) -> Floats:
    """[L, shards, num_rows * width] -> [L, num_rows, shards * width]."""
    split = by_shard.reshape(*by_shard.shape[:2], num_rows, -1).swapaxes(1, 2)
    return split.reshape(len(by_shard), num_rows, -1)
