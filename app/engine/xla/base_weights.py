"""Base weights on devices, as an adapter's extra weights need them: for DoRA's scales, and biases.

Per output, |W + BA|^2 = |W|^2 + 2 sum_r b_r (W a_r) + b (A A^T) b, so the device computes only |W|^2 and W a_r: a
product of the base with the adapter's rank rows in place of tokens. There is one program per module, compiled at start,
for adapters of any rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraKey, LoraPair, to_float32
from app.engine.models.linear_modules import LinearModule, linear_module_of
from app.engine.models.sharding import shard_columns, whole_output
from app.engine.xla.arrays import SHARD_AXES, Floats, XlaLayers
from app.engine.xla.sharding import shape_struct
from app.engine.xla.sizes import XlaSizes

#: Rank rows that a program multiplies at a time.
_ROWS = 32


class XlaBaseWeights:
    """`app.engine.adapters.extra_weights.BaseWeights`. Any thread."""

    def __init__(self, sizes: XlaSizes, layers: XlaLayers, mesh: Mesh) -> None:
        self._sizes, self._layers, self._mesh = sizes, layers, mesh
        self._whole_modules = tuple(module for module in sizes.whole if module.has_rank_rows)
        self._columns = {module.name: shard_columns(module, sizes.num_shards) for module in self._whole_modules}
        self._programs = {module.name: self._compile(module) for module in sizes.single if module.has_rank_rows}

    def warm_up(self) -> None:
        """Run every program once."""
        for module in self._whole_modules:
            self._base(module, module.targets[0], 0, np.zeros((1, module.d_in), np.float32))

    def dora_scale(self, key: LoraKey, magnitude: Floats, pair: LoraPair) -> Floats:
        """m / |W + BA| [d_out] (`app.kernels.dora.reference`); 0 where a row of W + BA is zero."""
        module = linear_module_of(self._whole_modules, key.target)
        a, b = (to_float32(matrix) for matrix in pair)
        products, squares = self._base(module, key.target, key.layer, a)
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        added = (wide_b * (2 * products + wide_a @ wide_a.T @ wide_b)).sum(axis=0)
        norms = np.sqrt(np.maximum(squares + added, 0))
        return np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0).astype(np.float32)

    def bias(self, key: LoraKey) -> Floats | None:
        """The base's bias of a module [d_out], if it has one."""
        module = linear_module_of(self._whole_modules, key.target)
        biases = self._layers.biases[module.name]
        return (
            None
            if biases is None
            else self._whole(np.asarray(biases)[self._sizes.stacked_layer(module.name, key.layer)], module, key.target)
        )

    def _base(self, module: LinearModule, target: str, layer: int, a: Floats) -> tuple[NDArray[np.float64], Floats]:
        """W a_r [r, d_out] of one module, and |W|^2 [d_out]. a: [r, d_in]."""
        found = []
        for first in range(0, len(a), _ROWS):
            rows = np.zeros((_ROWS, module.d_in), np.float32)
            count = min(_ROWS, len(a) - first)
            rows[:count] = a[first : first + count]
            if module.kind.split == "input":
                rows = rows[:, self._columns[module.name][target].reshape(-1)]
            stacked_layer = np.int32(self._sizes.stacked_layer(module.name, layer))
            lines = np.asarray(self._programs[module.name](self._layers.modules[module.name], rows, stacked_layer))
            whole = np.stack([self._whole(line, module, target) for line in [*lines[:count], lines[-1]]])
            found.append(whole)
        products = np.concatenate([whole[:-1] for whole in found]).astype(np.float64)
        return products, found[0][-1]

    def _whole(self, line: Floats, module: LinearModule, target: str) -> Floats:
        """A target's [d_out] from one value per column of the module."""
        if module.kind.split == "input":
            return line[: module.widths[0]]
        return whole_output(line, module, target, self._sizes.num_shards)

    def _compile(self, module: LinearModule) -> Any:
        """Compile (weights of all layers, rows, layer) -> the rows' products and then the squares, one line each."""
        stack, splits_input = self._layers.modules[module.name], module.kind.split == "input"
        run: Any = _products_and_squares
        num_shards = self._sizes.num_shards
        if num_shards > 1:
            run = jax.shard_map(
                partial(_sum_over_shards, run) if splits_input else run,
                mesh=self._mesh,
                in_specs=(stack.sharding.spec, P(None, SHARD_AXES) if splits_input else P(), P()),
                out_specs=P() if splits_input else P(None, SHARD_AXES),
                check_vma=False,
            )
        d_in = module.d_in * (num_shards if splits_input else 1)
        rows = shape_struct(self._mesh, (_ROWS, d_in), P(None, SHARD_AXES) if splits_input else P())
        weights = shape_struct(self._mesh, stack.shape, stack.sharding.spec, stack.dtype)
        return jax.jit(run).lower(weights, rows, shape_struct(self._mesh, (), P(), np.int32)).compile()


def _products_and_squares(stack: Array, rows: Array, layer: Array) -> Array:
    """Products of the rows and, as the last line, the squares: [rows + 1, columns]."""
    weights = stack[layer]
    products = lax.dot_general(rows, weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.concatenate([products, (weights * weights).sum(axis=1)[None]])


def _sum_over_shards(run: Any, *args: Any) -> Array:
    """Run a product whose input is split, and add up the shards' parts."""
    return lax.psum(run(*args), SHARD_AXES)
