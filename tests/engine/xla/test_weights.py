"""A checkpoint in memory: every column is the checkpoint's, on one shard and on two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.engine.errors import CheckpointError
from app.engine.models.sharding import shard_columns
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import EMBEDDING
from app.engine.xla.arrays import XlaWeights
from app.engine.xla.sizes import XlaSizes, sizes_of
from app.engine.xla.weights import read_weights
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec

BLOCKS = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}


def biased_spec() -> ModelSpec:
    spec = tiny_spec()
    layer = replace(spec.layers[0], attention=replace(spec.layers[0].attention, qkv_bias=True, o_bias=True))
    return replace(spec, layers=(layer, layer))


def read(num_shards: int) -> tuple[XlaSizes, XlaWeights, dict[str, np.ndarray]]:
    spec = biased_spec()
    tensors = dict(random_tensors(spec, 5))
    sizes = sizes_of(spec, num_shards)
    return sizes, read_weights(sizes, list(tensors.items()), 64), tensors


@pytest.mark.parametrize("num_shards", [1, 2])
def test_every_shard_has_its_columns_of_the_checkpoint(num_shards: int) -> None:
    sizes, weights, tensors = read(num_shards)
    for whole, module in zip(sizes.whole, sizes.modules, strict=True):
        is_output = module.kind.split == "output"
        for target, mine in shard_columns(whole, num_shards).items():
            columns = module.columns(target)
            for layer, shard in np.ndindex(2, num_shards):
                path = f"model.layers.{layer}.{BLOCKS[module.name]}.{target}"
                tensor = tensors[f"{path}.weight"]
                expected = tensor[mine[shard]] if is_output else tensor[:, mine[shard]]
                stack = weights.layers.modules[module.name]
                found = np.split(stack, num_shards, axis=1 if is_output else 2)[shard][layer, columns]
                np.testing.assert_array_equal(found, expected)
                if module.has_bias:
                    biases = weights.layers.biases[module.name][layer]
                    own = np.split(biases, num_shards)[shard] if is_output else biases
                    bias = tensors[f"{path}.bias"]
                    np.testing.assert_array_equal(own[columns], bias[mine[shard]] if is_output else bias)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_head_is_split_by_the_vocabulary_and_is_the_embedding_where_one_shard_ties_them(num_shards: int) -> None:
    sizes, weights, tensors = read(num_shards)
    for shard in range(num_shards):
        first = shard * sizes.vocab_per_shard
        count = min(sizes.vocab_per_shard, sizes.spec.vocab_size - first)
        found = np.split(weights.head, num_shards, axis=1)[shard][0, :count]
        np.testing.assert_array_equal(found, tensors[EMBEDDING][first : first + count])
    if num_shards == 1:
        assert weights.embedding is None
    else:
        np.testing.assert_array_equal(weights.embedding, tensors[EMBEDDING])


def test_a_tensor_without_a_place_and_a_missing_one_are_named() -> None:
    spec = tiny_spec()
    sizes, tensors = sizes_of(spec, 1), random_tensors(spec)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.7\.mlp\.up_proj\.weight' has no place in tiny"):
        read_weights(sizes, [("model.layers.7.mlp.up_proj.weight", tensors[0][1])], 64)
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors, the first: '{tensors[3][0]}'"):
        read_weights(sizes, [*tensors[:3], *tensors[4:]], 64)
