"""Adapter tables as arrays: their shapes, an adapter's rows in that shape, and the write.

In: a `LoraAdapter` and a rank class. Out: rows of one fixed shape per class, zero wherever the adapter has
nothing (modules it leaves alone, rows beyond a module's rank), so that a write erases what was there before.
A class is `RANK_CHUNK` times a power of two, like the runs of rank rows the engine hands out.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraAdapter
from app.engine.jax_backend.arrays import AdapterTables
from app.engine.jax_backend.sizes import GROUPS, ROW_PARALLEL, Sizes, shard_columns
from app.engine.models.spec import ModelSpec
from app.kernels.sgmv._ffi import packed_a
from app.kernels.sgmv._jax import RANK_CHUNK

_GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}


def rank_classes(num_rows: int) -> list[int]:
    """Lengths of the runs an adapter can own, shortest first."""
    return [RANK_CHUNK << k for k in range(32) if RANK_CHUNK << k <= num_rows]


def table_shapes(sizes: Sizes, num_rows: int) -> AdapterTables:
    """The shape of each table with `num_rows` rank rows."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards = sizes.num_shards
    for group, modules in GROUPS.items():
        d_in, d_out = sizes.group_inputs[group], sum(sizes.group_outputs[group])
        is_row = group in ROW_PARALLEL
        if sizes.form == "cpu":
            shapes[f"a_{group}"] = (sizes.num_layers, len(modules), num_rows, shards * d_in if is_row else d_in)
        else:
            shapes[f"a_{group}"] = (sizes.num_layers, num_rows, shards * d_in if is_row else len(modules) * d_in)
        shapes[f"b_{group}"] = (sizes.num_layers, num_rows, d_out if is_row else shards * d_out)
    return AdapterTables(**shapes)


def adapter_rows(adapter: LoraAdapter, spec: ModelSpec, sizes: Sizes, num_rows: int) -> AdapterTables:
    """The adapter's rows, `num_rows` of them, as NumPy arrays in the tables' layout."""
    arrays: dict[str, NDArray[np.float32]] = {
        name: np.zeros(shape, np.float32) for name, shape in table_shapes(sizes, num_rows)._asdict().items()
    }
    columns = shard_columns(spec, sizes.num_shards)
    for key, pair in adapter.weights.items():
        group = _GROUP_OF[key.target]
        a, b = arrays[f"a_{group}"], arrays[f"b_{group}"]
        mine, rank = columns[key.target], pair.rank
        module = GROUPS[group].index(key.target)
        if sizes.form != "cpu":
            a = a.reshape(sizes.num_layers, num_rows, len(GROUPS[group]), -1).swapaxes(1, 2)  # a view
        a[key.layer, module, :rank] = pair.a[:, mine.reshape(-1)] if group in ROW_PARALLEL else pair.a
        if group in ROW_PARALLEL:
            b[key.layer, :rank] = pair.b
        else:
            start = sum(sizes.group_outputs[group][:module])
            by_shard = b[key.layer].reshape(num_rows, sizes.num_shards, -1)  # a view
            by_shard[:rank, :, start : start + mine.shape[1]] = pair.b[:, mine]
    if sizes.form == "cpu":
        for group in GROUPS:
            shards = sizes.num_shards if group in ROW_PARALLEL else 1
            a = arrays[f"a_{group}"]
            by_shard = a.reshape(*a.shape[:-1], shards, -1)
            for shard in range(shards):
                by_shard[..., shard, :] = packed_a(by_shard[..., shard, :])
    return AdapterTables(**arrays)


def write_rows(tables: AdapterTables, rows: AdapterTables, row_start: Array) -> AdapterTables:
    """The tables with `rows` at `row_start`; donated, so written in place. Rows are the last axis but one."""
    return jax.tree.map(
        lambda table, new: lax.dynamic_update_slice_in_dim(table, new, row_start, axis=table.ndim - 2), tables, rows
    )
