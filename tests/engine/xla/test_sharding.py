"""How arrays are divided over devices: cut as the specifications say, a device has just what it computes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from app.engine.errors import ConfigError
from app.engine.models.linear_modules import LATENT_B
from app.engine.models.sharding import shard_columns
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import EMBEDDING, LM_HEAD
from app.engine.xla.adapters import XlaAdapters
from app.engine.xla.arrays import EXPERT_AXIS, TENSOR_AXIS, KvMemory
from app.engine.xla.sharding import kv_specs, make_mesh, over_shards, weight_specs
from app.engine.xla.sizes import XlaSizes, sizes_of
from app.engine.xla.weights import read_weights
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec
from tests.engine.batch_invariance import latent_spec, sinks_spec
from tests.engine.xla.test_tensor_parallel import spec as eight_heads
from tests.engine.xla.tiny_backends import divisible_mixture

#: (model, tensor shards, expert shards)
DIVIDED = [
    (tiny_spec(), 2, 1),
    (eight_heads(), 8, 1),
    (divisible_mixture(), 2, 3),
    (sinks_spec(), 2, 1),
    (sinks_spec(), 1, 2),
    (latent_spec(), 1, 3),
]


def cut(array: Any, spec: P, expert: int, tensor: int, sizes: XlaSizes) -> Any:
    """What the device at (expert, tensor) of the mesh has of an array."""
    for axis, names in enumerate(spec):
        number, index = 1, 0
        for name in () if names is None else (names,) if isinstance(names, str) else names:
            count, mine = {
                EXPERT_AXIS: (sizes.expert_shards, expert),
                TENSOR_AXIS: (sizes.tensor_shards, tensor),
            }[name]
            number, index = number * count, index * count + mine
        assert array.shape[axis] % number == 0, (array.shape, spec)
        array = np.split(array, number, axis=axis)[index]
    return array


@pytest.mark.parametrize(("spec", "tensor", "expert"), DIVIDED)
def test_a_device_has_its_own_part_of_the_checkpoint(spec: ModelSpec, tensor: int, expert: int) -> None:
    sizes = sizes_of(spec, tensor, expert)
    tensors = dict(random_tensors(spec, 7))
    weights = read_weights(sizes, list(tensors.items()), 16)
    specs = weight_specs(weights, sizes)
    for e, t in np.ndindex(expert, tensor):
        device = e * tensor + t
        mine = jax.tree.map(lambda array, each, e=e, t=t: cut(array, each, e, t, sizes), weights, specs)
        for whole, module in zip(sizes.whole, sizes.modules, strict=True):
            if module.kind is LATENT_B:
                continue
            is_output, is_single = module.kind.split == "output", module.num_experts is None
            parts = shard_columns(whole, sizes.shards_of(module))
            first = 0 if is_single else e * sizes.experts_per_shard
            for target in module.targets:
                columns, own = module.columns(target), parts[target][device if is_single else t]
                for layer in sizes.layers_of(module.name):
                    stacked_layer = sizes.stacked_layer(module.name, layer)
                    for number in range(1 if is_single else sizes.experts_per_shard):
                        path = module.kind.path(target, None if is_single else first + number)
                        stored = tensors[f"model.layers.{layer}.{path}.weight"]
                        index = stacked_layer if is_single else stacked_layer * sizes.experts_per_shard + number
                        found = mine.layers.modules[module.name][index, columns]
                        np.testing.assert_array_equal(found, stored[own] if is_output else stored[:, own])
                        if module.has_bias:
                            bias = tensors[f"model.layers.{layer}.{path}.bias"]
                            found = mine.layers.biases[module.name][index, columns]
                            np.testing.assert_array_equal(found, bias[own] if is_output else bias)
        rows = tensors[EMBEDDING if spec.tie_embeddings else LM_HEAD][device * sizes.vocab_per_shard :]
        count = min(len(rows), sizes.vocab_per_shard)
        np.testing.assert_array_equal(mine.head[0, :count], rows[:count])
        assert not mine.head[0, count:].any()


def test_heads_of_latents_lie_with_the_devices_that_attend_with_them() -> None:
    spec = latent_spec()
    sizes = sizes_of(spec, 1, 3)
    latent = sizes.attention.latent
    assert latent is not None
    tensors = dict(random_tensors(spec, 7))
    weights = read_weights(sizes, list(tensors.items()), 16)
    specs = weight_specs(weights, sizes)
    keys, values = (module.name for module in sizes.absorbed)
    for layer, head in np.ndindex(sizes.num_layers, 3):
        rows = tensors[f"model.layers.{layer}.{LATENT_B.path(LATENT_B.targets[0])}.weight"]
        rows = rows.reshape(3, -1, latent.kv_rank)[head]
        for name, expected in ((keys, rows[: latent.key_size].T), (values, rows[latent.key_size :])):
            mine = cut(weights.layers.modules[name], specs.layers.modules[name], head, 0, sizes)
            np.testing.assert_array_equal(mine[layer], expected)


@pytest.mark.parametrize(("spec", "tensor", "expert"), DIVIDED)
def test_adapter_tables_are_cut_like_what_they_are_added_to(spec: ModelSpec, tensor: int, expert: int) -> None:
    sizes = sizes_of(spec, tensor, expert)
    weights = read_weights(sizes, random_tensors(spec, 7), 16)
    adapters = XlaAdapters(sizes, weights, 4, 32, 0, make_mesh(jax.devices("cpu"), 1))
    specs, shapes = adapters.specs(), adapters.table_shapes()
    for module in sizes.single:
        for target, width in zip(module.targets, module.widths, strict=True):
            layers = len(sizes.layers_of(module.name))
            a = cut(np.broadcast_to(np.float32(0), shapes.a[target]), specs.a[target], 0, 0, sizes)
            b = cut(np.broadcast_to(np.float32(0), shapes.b[target]), specs.b[target], 0, 0, sizes)
            assert a.shape == (layers, 32, module.d_in), target
            assert b.shape == (layers, 32, width), target


def test_keys_are_divided_by_head_and_latents_are_everybodys() -> None:
    by_head = kv_specs(sizes_of(tiny_spec(), 2))
    assert by_head.keys == by_head.values == P(None, None, (EXPERT_AXIS, TENSOR_AXIS))
    assert kv_specs(sizes_of(latent_spec(), 1, 3)) == KvMemory(P(), None)


def test_one_device_runs_the_step_as_it_is() -> None:
    spec = tiny_spec()
    sizes = sizes_of(spec, 1)
    weights = read_weights(sizes, random_tensors(spec), 16)
    mesh = make_mesh(jax.devices("cpu"), 1)
    assert (mesh.axis_names, mesh.devices.shape) == ((EXPERT_AXIS, TENSOR_AXIS), (1, 1))
    tables = XlaAdapters(sizes, weights, 2, 8, 0, mesh).specs()
    assert over_shards(print, mesh, weights, tables, sizes) is print


def test_too_few_devices_are_told_with_both_settings_where_both_matter() -> None:
    devices = jax.devices("cpu")[:1]
    with pytest.raises(ConfigError, match=r"engine\.xla\.tensor_parallel is 2 but JAX sees 1 cpu devices; lower it"):
        make_mesh(devices, 2)
    message = r"engine\.xla\.tensor_parallel is 1 times engine\.xla\.expert_parallel 3 but JAX sees 1 cpu devices"
    with pytest.raises(ConfigError, match=message):
        make_mesh(devices, 1, 3)
