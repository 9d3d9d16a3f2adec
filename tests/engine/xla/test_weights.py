"""A checkpoint in either form's memory: every column is the checkpoint's, on one shard and on two."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.engine.errors import CheckpointError, ConfigError
from app.engine.models.names import EMBEDDING
from app.engine.models.sharding import shard_columns
from app.engine.models.spec import ModelSpec
from app.engine.xla.arrays import XlaWeights
from app.engine.xla.cpu_operations import CpuOperations
from app.engine.xla.forms import operations_of
from app.engine.xla.operations import FormName, Operations
from app.engine.xla.sizes import XlaSizes, sizes_of
from app.engine.xla.weights import read_weights
from app.engine.xla.xla_operations import XlaOperations
from app.kernels.matmul.quantised import Quantised
from tests.engine.adapters.making import random_tensors, tiny_spec
from tests.seeds import rng

BLOCKS = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}


def biased_spec() -> ModelSpec:
    spec = tiny_spec()
    layer = replace(spec.layers[0], attention=replace(spec.layers[0].attention, qkv_bias=True, o_bias=True))
    return replace(spec, layers=(layer, layer))


def read(form: FormName, num_shards: int, storage: str = "float32") -> tuple[Operations, XlaSizes, XlaWeights, dict]:
    spec = biased_spec()
    tensors = {
        name: np.rint(tensor * 64) / 64 if tensor.ndim == 2 else tensor for name, tensor in random_tensors(spec, 5)
    }
    operations = operations_of(form, "cpu")
    sizes = sizes_of(spec, num_shards, operations.column_multiple)
    weights = read_weights(sizes, operations, list(tensors.items()), 64, storage)  # type: ignore[arg-type]
    operations.close()
    return operations, sizes, weights, tensors


def shard_of(stack: object, shard: int, num_shards: int, axis: int) -> object:
    return jax.tree.map(lambda array: jnp.array(np.split(array, num_shards, axis=axis)[shard]), stack)


@pytest.mark.parametrize(("form", "storage"), [("cpu", "float32"), ("cpu", "auto"), ("xla", "float32")])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_every_shard_has_its_columns_of_the_checkpoint(form: FormName, num_shards: int, storage: str) -> None:
    operations, sizes, weights, tensors = read(form, num_shards, storage)
    assert isinstance(weights.layers.products["qkv"], Quantised) == (storage == "auto")
    for whole, product in zip(sizes.whole, sizes.products, strict=True):
        is_output = product.kind.split == "output"
        for target, mine in shard_columns(whole, num_shards).items():
            columns = product.columns(target, sizes.column_multiple)
            for layer, shard in np.ndindex(2, num_shards):
                path = f"model.layers.{layer}.{BLOCKS[product.name]}.{target}"
                tensor = tensors[f"{path}.weight"]
                expected = tensor[mine[shard]] if is_output else tensor[:, mine[shard]]
                stack = shard_of(weights.layers.products[product.name], shard, num_shards, 1 if is_output else 2)
                found = operations.columns(stack, layer, jnp.arange(columns.start, columns.stop))
                np.testing.assert_allclose(found, expected, rtol=1e-6)
                if product.has_bias:
                    biases = weights.layers.biases[product.name][layer]
                    own = np.split(biases, num_shards)[shard] if is_output else biases
                    bias = tensors[f"{path}.bias"]
                    np.testing.assert_array_equal(own[columns], bias[mine[shard]] if is_output else bias)


@pytest.mark.parametrize("form", ["cpu", "xla"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_head_is_split_by_the_vocabulary_and_is_the_embedding_where_one_shard_ties_them(
    form: FormName, num_shards: int
) -> None:
    operations, sizes, weights, tensors = read(form, num_shards)
    for shard in range(num_shards):
        part = shard_of(weights.head, shard, num_shards, 1)
        first = shard * sizes.vocab_per_shard
        count = min(sizes.vocab_per_shard, sizes.spec.vocab_size - first)
        found = operations.columns(part, 0, jnp.arange(count))
        np.testing.assert_array_equal(found, tensors[EMBEDDING][first : first + count])
    if num_shards == 1:
        assert weights.embedding is None
    else:
        np.testing.assert_array_equal(weights.embedding, tensors[EMBEDDING])


def test_a_tensor_without_a_place_and_a_missing_one_are_named() -> None:
    spec, operations = tiny_spec(), XlaOperations()
    sizes, tensors = sizes_of(spec, 1, 1), random_tensors(spec)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.7\.mlp\.up_proj\.weight' has no place in tiny"):
        read_weights(sizes, operations, [("model.layers.7.mlp.up_proj.weight", tensors[0][1])], 64, "float32")
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors, the first: '{tensors[3][0]}'"):
        read_weights(sizes, operations, [*tensors[:3], *tensors[4:]], 64, "float32")


def test_the_form_follows_from_the_platform_unless_it_is_named() -> None:
    for form, platform, kind in (
        ("auto", "cpu", CpuOperations), ("cpu", "cpu", CpuOperations), ("xla", "cpu", XlaOperations),
        ("auto", "tpu", XlaOperations), ("xla", "gpu", XlaOperations),
    ):  # fmt: skip
        operations = operations_of(form, platform)
        assert type(operations) is kind
        operations.close()
    with pytest.raises(ConfigError, match=r"engine\.xla\.form is 'cpu' but the device is a tpu"):
        operations_of("cpu", "tpu")


@pytest.mark.parametrize(("rank", "d_in", "width"), [(1, 5, 16), (8, 24, 48), (13, 7, 32)])
def test_rows_are_packed_as_the_kernels_read_them(rank: int, d_in: int, width: int) -> None:
    generator = rng()
    a, b = (generator.normal(size=(rank, size)).astype(np.float32) for size in (d_in, width))
    operations = CpuOperations()
    packed = operations.pack_rows(a, b)
    operations.close()
    for r, k in np.ndindex(rank, d_in):
        assert packed.a[r // 8, k, r % 8] == a[r, k]
    assert not packed.a[-1, :, (rank - 1) % 8 + 1 :].any()
    for r, column in np.ndindex(rank, width):
        assert packed.b[column // 16, r, column % 16] == b[r, column]
    same = XlaOperations().pack_rows(a, b)
    assert same.a is a
    assert same.b is b
