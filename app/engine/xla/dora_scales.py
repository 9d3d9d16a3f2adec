"""DoRA's scales, from the base's weights and an adapter's rank rows where they lie on devices.

In: the tables, an adapter's rows written. Out: m / |W + BA| [d_out] per module (`app.kernels.dora.reference`), on the
host. One program per product, for adapters of any rank. A row of o or down lies in several shards: each gives the
squares of its part, and they are added here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraAdapter, LoraKey
from app.engine.models.spec import ModelSpec
from app.engine.xla.arrays import TENSOR_AXIS, AdapterTables
from app.engine.xla.sizes import GROUP_OF, GROUPS, ROW_PARALLEL, Sizes, shard_columns, whole_output
from app.engine.xla.weights import LayerWeights
from app.kernels.extras.xla import squared_norms
from app.kernels.sgmv.xla import RANK_CHUNK

Floats = NDArray[np.float32]


class DoraScales:
    """The programs, and what they are called with."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, layers: LayerWeights, mesh: Mesh) -> None:
        self._spec, self._sizes, self._layers, self._mesh = spec, sizes, layers, mesh
        self._columns = shard_columns(spec, sizes.num_shards)
        self._programs: dict[str, Any] = {}

    def warm_up(self, rows: AdapterTables) -> None:
        """Compile every program."""
        for group in GROUPS:
            self._program(group, rows)

    def of(self, adapter: LoraAdapter, row_start: int, rows: AdapterTables) -> dict[LoraKey, Floats]:
        """The scale of every module that has a magnitude; 0 where a row of W + BA is zero."""
        num_chunks = -(-adapter.card.max_rank // RANK_CHUNK)
        places = sorted({(key.layer, GROUP_OF[key.target]) for key in adapter.magnitudes})
        squares = {
            (layer, group): self._program(group, rows)(
                *self._tables(group, rows), *np.array([layer, row_start, num_chunks], np.int32)
            )
            for layer, group in places
        }
        scales = {}
        for key, magnitude in adapter.magnitudes.items():
            norms = np.sqrt(self._module(key, np.asarray(squares[key.layer, GROUP_OF[key.target]])))
            scales[key] = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
        return scales

    def _module(self, key: LoraKey, squares: Floats) -> Floats:
        """One module's squared norms [d_out] out of its product's, shard by shard."""
        if GROUP_OF[key.target] in ROW_PARALLEL:
            total: Floats = squares.reshape(self._sizes.num_shards, -1).sum(axis=0)
            return total
        return whole_output(squares, self._spec, self._sizes, self._columns, key)

    def _tables(self, group: str, rows: AdapterTables) -> tuple[Any, ...]:
        return getattr(self._layers, group), getattr(rows, f"a_{group}"), getattr(rows, f"b_{group}")

    def _program(self, group: str, rows: AdapterTables) -> Any:
        if group not in self._programs:
            tables = self._tables(group, rows)
            run: Any = partial(squared_norms, out_sizes=self._sizes.group_outputs[group])
            if self._sizes.num_shards > 1:
                specs = (*(table.sharding.spec for table in tables), P(), P(), P())
                run = jax.shard_map(run, mesh=self._mesh, in_specs=specs, out_specs=P(TENSOR_AXIS), check_vma=False)
            shapes = [jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=table.sharding) for table in tables]
            number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(self._mesh, P()))
            self._programs[group] = jax.jit(run).lower(*shapes, number, number, number).compile()
        return self._programs[group]
