"""Which axis of each array lies along which axis of the device mesh.

A mesh has three named axes: `data` (replicas of the model), `expert` and `tensor`. Today's decoder splits over
`tensor` only; the other two have length 1 and are named so that arrays keep their annotations when they grow.
Axes hold whole shards one after the other: nothing is left to a partitioner's choice,
and the only communication is what the decoder writes down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from app.engine.errors import ConfigError
from app.engine.xla.arrays import TENSOR_AXIS, KvMemory, Outcome
from app.engine.xla.sizes import Sizes
from app.engine.xla.weights import LayerWeights, Weights

AXES = ("data", "expert", TENSOR_AXIS)
REPLICATED = P()
KV_SPEC = P(None, None, TENSOR_AXIS)
_SPLIT_OUTPUT = {"qkv", "gate_up", "qkv_bias", "gate_up_bias"}
_SPLIT_INPUT = {"o", "down"}


def make_mesh(devices: Sequence[jax.Device], tensor_parallel: int) -> Mesh:
    """The first `tensor_parallel` devices as a mesh; ConfigError if there are not enough."""
    if len(devices) < tensor_parallel:
        raise ConfigError(
            f"engine.xla.tensor_parallel is {tensor_parallel} but JAX sees {len(devices)} "
            f"{devices[0].platform} devices; lower it, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count"
        )
    return Mesh(np.array(devices[:tensor_parallel]).reshape(1, 1, tensor_parallel), AXES)


def weight_specs(weights: Weights, sizes: Sizes) -> Weights:
    """A PartitionSpec for each array of `weights`; None stays None. Arrays of an 8-bit stack are split alike."""
    layers = {name: _each(field, _layer_spec(name)) for name, field in weights.layers._asdict().items()}
    head = _each(weights.head, P(None, TENSOR_AXIS) if sizes.form == "cpu" else P(TENSOR_AXIS))
    return Weights(_each(weights.embedding, P()), head, P(), P(), P(), P(), LayerWeights(**layers))


def _each(field: Any, spec: P) -> Any:
    return jax.tree.map(lambda _: spec, field)


def _layer_spec(name: str) -> P:
    if name in _SPLIT_OUTPUT:
        return P(None, TENSOR_AXIS)
    return P(None, None, TENSOR_AXIS) if name in _SPLIT_INPUT else P()


def over_shards(
    step: Callable[..., Any], mesh: Mesh, weights: Weights, tables: Any, sizes: Sizes
) -> Callable[..., Any]:
    """`step(weights, tables, kv, flat)` run in every shard of `mesh`; as it is where there is only one.

    tables: a PartitionSpec for each array of the tables.
    """
    if mesh.size == 1:
        return step
    kv = KvMemory(KV_SPEC, KV_SPEC)
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(weight_specs(weights, sizes), tables, kv, REPLICATED),
        out_specs=(kv, Outcome(REPLICATED, REPLICATED)),
        check_vma=False,
    )
