"""Packed weights: `auto` takes 8 bits exactly where every weight reads back as it was."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from app.engine.cpu.decoder import Weights
from app.engine.cpu.weights import WeightDtype, WeightPacker
from app.engine.errors import CheckpointError
from app.engine.models.spec import ModelSpec
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Int8Panels
from app.kernels.matmul.pack_weights import dequantise
from tests import seeds
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec
from tests.engine.cuda.grids import on_grids

STACKS = ("head", "qkv", "o", "gate_up", "down")
Tensors = list[tuple[str, np.ndarray]]


def _on_grids(spec: ModelSpec) -> Tensors:
    """Embeddings on grids of 8 bits, linear weights on grids of 4."""
    bits = {name: 8 if "embed" in name else 4 for name, _ in random_tensors(spec)}
    return [(name, on_grids(w, bits[name]) if w.ndim == 2 else w) for name, w in random_tensors(spec)]


def _packed(spec: ModelSpec, tensors: Iterable[tuple[str, np.ndarray]], storage: WeightDtype) -> Weights:
    team = ThreadTeam(2)
    try:
        return WeightPacker(spec, 64, storage, team).pack_all(tensors)
    finally:
        team.close()


def _in_8_bits(weights: Weights) -> set[str]:
    return {name for name in STACKS if isinstance(getattr(weights, name), Int8Panels)}


def _expanded(weights: Weights, name: str) -> np.ndarray:
    stack = getattr(weights, name)
    if isinstance(stack, Int8Panels):
        return np.stack([dequantise(Int8Panels._make(part[i] for part in stack)) for i in range(len(stack.levels))])
    return np.asarray(stack)


def test_weights_on_grids_are_in_8_bits_and_read_back_to_the_bit() -> None:
    spec = tiny_spec(3)
    tensors = _on_grids(spec)
    wide, auto, narrow = (_packed(spec, tensors, storage) for storage in ("float32", "auto", "int8"))
    assert (_in_8_bits(wide), _in_8_bits(auto), _in_8_bits(narrow)) == (set(), set(STACKS), set(STACKS))
    for name in STACKS:
        np.testing.assert_array_equal(_expanded(auto, name), _expanded(wide, name))
        np.testing.assert_array_equal(_expanded(narrow, name), _expanded(wide, name))


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "qkv"),
        ("model.layers.2.mlp.up_proj.weight", "gate_up"),
        ("model.layers.1.mlp.down_proj.weight", "down"),
        ("model.embed_tokens.weight", "head"),
    ],
)
def test_one_weight_beside_its_grid_keeps_its_projection_in_float32(name: str, stack: str) -> None:
    """In any tensor and in any order: what was stored in 8 bits before is taken back."""
    spec = tiny_spec(3)
    tensors = dict(_on_grids(spec))
    rng = seeds.rng()
    at = tuple(int(rng.integers(size)) for size in tensors[name].shape)
    tensors[name][at] += np.float32(0.0123)
    order = [(key, tensors[key]) for key in rng.permutation(list(tensors)).tolist()]
    wide, auto, narrow = (_packed(spec, order, storage) for storage in ("float32", "auto", "int8"))
    assert _in_8_bits(auto) == set(STACKS) - {stack}
    for each in STACKS:
        np.testing.assert_array_equal(_expanded(auto, each), _expanded(wide, each))
    assert _in_8_bits(narrow) == set(STACKS)
    error = np.abs(_expanded(narrow, stack) - _expanded(wide, stack))
    assert 0 < error.max() < 0.01


def test_a_checkpoint_on_no_grid_stays_in_float32() -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec)
    wide, auto = (_packed(spec, tensors, storage) for storage in ("float32", "auto"))
    assert _in_8_bits(auto) == set()
    for name in STACKS:
        np.testing.assert_array_equal(_expanded(auto, name), _expanded(wide, name))


def test_every_tensor_must_come_and_have_a_place() -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec)
    with pytest.raises(CheckpointError, match="lacks 1 tensors"):
        _packed(spec, tensors[1:], "auto")
    with pytest.raises(CheckpointError, match="has no place"):
        _packed(spec, [*tensors, ("model.other.weight", np.zeros((2, 2), np.float32))], "auto")
