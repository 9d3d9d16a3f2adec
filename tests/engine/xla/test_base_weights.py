"""What extras need to know of a base whose weights lie on devices: its biases, and the norms of its changed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from app.engine.adapters.adapter import LoraKey, LoraPair
from app.engine.config import EngineConfig, XlaConfig
from app.engine.xla.backend import XlaBackend
from app.engine.xla.base_weights import XlaBaseWeights
from app.engine.xla.sharding import make_mesh
from app.kernels.dora.reference import dora_scale
from tests.engine.adapters.random_adapters import random_tensors
from tests.engine.xla.test_tensor_parallel import spec as eight_heads
from tests.engine.xla.tiny_backends import divisible_mixture
from tests.seeds import rng

Base = tuple[XlaBaseWeights, dict[str, np.ndarray]]
CONFIG = EngineConfig(num_kv_blocks=4, lora_pool_rows=8, max_num_batched_tokens=8, max_num_seqs=2)
PATHS = {"q_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "gate_proj": "mlp", "down_proj": "mlp"}


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    """A model with a bias on every module, and its tensors."""
    spec = eight_heads()
    tensors = dict(random_tensors(spec, 3))
    tensors["model.layers.0.mlp.down_proj.weight"][5] = 0
    config = CONFIG.on(XlaConfig(skip_precompile=True))
    backend = XlaBackend(spec, list(tensors.items()), config, make_mesh(jax.devices("cpu"), 1))
    values = backend._adapters._base
    assert values is not None
    yield values, tensors
    backend.close()


@pytest.mark.parametrize("target", PATHS)
def test_a_bias_is_the_modules_own(base: Base, target: str) -> None:
    values, tensors = base
    for layer in range(3):
        expected = tensors[f"model.layers.{layer}.{PATHS[target]}.{target}.bias"]
        found = values.bias(LoraKey(layer, target))
        assert found is not None
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rank", [1, 31, 32, 33, 70])
def test_the_rows_of_any_rank_are_multiplied_in_parts_of_one_size(base: Base, rank: int) -> None:
    values, tensors = base
    generator = rng()
    for target in PATHS:
        w = tensors[f"model.layers.2.{PATHS[target]}.{target}.weight"]
        d_out, d_in = w.shape
        pair = LoraPair(
            generator.normal(0, 0.2, (rank, d_in)).astype(np.float32),
            generator.normal(0, 0.2, (rank, d_out)).astype(np.float32),
        )
        magnitude = generator.normal(1, 0.3, d_out).astype(np.float32)
        found = values.dora_scale(LoraKey(2, target), magnitude, pair)
        np.testing.assert_allclose(found, dora_scale(magnitude, w, pair.a, pair.b), rtol=1e-4)


def test_a_row_of_zeros_has_the_scale_zero_and_nothing_is_divided_by_it(base: Base) -> None:
    values, tensors = base
    w = tensors["model.layers.0.mlp.down_proj.weight"]
    assert not w[5].any()
    pair = LoraPair(np.ones((2, w.shape[1]), np.float32), np.zeros((2, len(w)), np.float32))
    found = values.dora_scale(LoraKey(0, "down_proj"), np.ones(len(w), np.float32), pair)
    assert found[5] == 0
    expected = 1 / np.linalg.norm(np.delete(w, 5, axis=0), axis=1)
    np.testing.assert_allclose(np.delete(found, 5), expected, rtol=1e-5)


def test_layers_without_a_product_do_not_shift_the_others() -> None:
    """Of this mixture the middle layer alone has a dense feed-forward block."""
    spec = divisible_mixture()
    spec = dataclasses.replace(spec, layers=(spec.layers[1], spec.layers[0], spec.layers[2]))
    tensors = dict(random_tensors(spec, 5))
    config = CONFIG.on(XlaConfig(skip_precompile=True))
    backend = XlaBackend(spec, list(tensors.items()), config, make_mesh(jax.devices("cpu"), 1))
    values = backend._adapters._base
    assert values is not None
    w = tensors["model.layers.1.mlp.up_proj.weight"]
    pair = LoraPair(np.zeros((1, w.shape[1]), np.float32), np.zeros((1, len(w)), np.float32))
    found = values.dora_scale(LoraKey(1, "up_proj"), np.ones(len(w), np.float32), pair)
    np.testing.assert_allclose(found, 1 / np.linalg.norm(w, axis=1), rtol=1e-5)
    assert values.bias(LoraKey(1, "up_proj")) is None
    backend.close()
