"""PartitionSpecs: the array axes that lie along each axis of the device mesh.

The mesh has two named axes, `expert` and `tensor`. Experts lie along `expert`, their columns along `tensor`; everything
else is divided over both together. Axes hold whole shards one after the other: no partitioner decides anything, and the
decoder spells out all communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import DTypeLike

from app.engine.errors import ConfigError
from app.engine.models.linear_modules import LATENT_B
from app.engine.xla.arrays import EXPERT_AXIS, SHARD_AXES, TENSOR_AXIS, KvMemory, RankTables, StepResult, XlaWeights
from app.engine.xla.sizes import XlaSizes

REPLICATED = P()
_COLUMNS, _DEPTH = P(None, SHARD_AXES), P(None, None, SHARD_AXES)
_EXPERT_COLUMNS, _EXPERT_DEPTH = P(EXPERT_AXIS, TENSOR_AXIS), P(EXPERT_AXIS, None, TENSOR_AXIS)


def make_mesh(devices: Sequence[jax.Device], tensor_parallel: int, expert_parallel: int = 1) -> Mesh:
    """A mesh of the first tensor_parallel * expert_parallel devices. Raises ConfigError if there are fewer."""
    count = tensor_parallel * expert_parallel
    if len(devices) < count:
        times = f" times engine.xla.expert_parallel {expert_parallel}" if expert_parallel > 1 else ""
        raise ConfigError(
            f"engine.xla.tensor_parallel is {tensor_parallel}{times} but JAX sees {len(devices)} "
            f"{devices[0].platform} devices; lower it, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count"
        )
    return Mesh(np.array(devices[:count]).reshape(expert_parallel, tensor_parallel), SHARD_AXES)


def weight_specs(weights: XlaWeights, sizes: XlaSizes) -> XlaWeights:
    """A PartitionSpec for each array of `weights`; None stays None."""
    specs: XlaWeights = jax.tree.map(lambda _: REPLICATED, weights)
    modules, biases = dict(specs.layers.modules), dict(specs.layers.biases)
    for module in sizes.modules:
        if module.kind is LATENT_B:
            continue  # `absorbed` stand for it
        is_output = module.kind.split == "output"
        columns, depth = (_COLUMNS, _DEPTH) if module.num_experts is None else (_EXPERT_COLUMNS, _EXPERT_DEPTH)
        modules[module.name] = _each(modules[module.name], columns if is_output else depth)
        if module.num_experts is None:
            bias = _COLUMNS if is_output else REPLICATED
        else:
            bias = _EXPERT_COLUMNS if is_output else P(EXPERT_AXIS)
        biases[module.name] = _each(biases[module.name], bias)
    for module in sizes.absorbed:
        modules[module.name] = _each(modules[module.name], P(SHARD_AXES))
    sinks = _each(specs.layers.sinks, _COLUMNS)
    layers = specs.layers._replace(modules=modules, biases=biases, sinks=sinks)
    if sizes.attention.whole_qk_norm:
        layers = layers._replace(q_norm=_COLUMNS, k_norm=_COLUMNS)
    return specs._replace(head=_each(specs.head, _COLUMNS), layers=layers)


def kv_specs(sizes: XlaSizes) -> KvMemory:
    """PartitionSpecs of KV memory: keys and values are divided by heads; latents, which all heads share, are on every
    device.
    """
    if sizes.attention.latent is not None:
        return KvMemory(REPLICATED, None)
    by_head = P(None, None, SHARD_AXES)
    return KvMemory(by_head, by_head)


def shape_struct(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: DTypeLike = np.float32) -> jax.ShapeDtypeStruct:
    """An array with this layout, to compile a program for."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _each(field: Any, spec: P) -> Any:
    return jax.tree.map(lambda _: spec, field, is_leaf=lambda node: isinstance(node, P))


def over_shards(
    step: Callable[..., Any], mesh: Mesh, weights: XlaWeights, tables: RankTables, sizes: XlaSizes
) -> Callable[..., Any]:
    """`step(weights, tables, places, kv, flat)` run in every shard of `mesh`; `step` itself for a single one.

    tables: a PartitionSpec for each table.
    """
    if mesh.size == 1:
        return step
    kv = kv_specs(sizes)
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(weight_specs(weights, sizes), tables, REPLICATED, kv, REPLICATED),
        out_specs=(kv, StepResult(REPLICATED, REPLICATED, REPLICATED)),
        check_vma=False,
    )
