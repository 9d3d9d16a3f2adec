"""How base weights lie in memory: `auto` takes 8 bits only where every logit keeps its bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.engine.config import CpuConfig, EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.kernels.matmul.int8 import Int8Panels
from tests.engine.adapters.parity import random_tokens
from tests.engine.adapters.random_adapters import random_adapter
from tests.engine.checkpoints import tiny_model
from tests.engine.cuda.grids import put_on_grids
from tests.engine.served import CONFIG, served_logits

STACKS = {"head", "qkv", "o", "gate_up", "down"}


def _config(storage: Literal["auto", "float32", "int8"]) -> EngineConfig:
    return CONFIG.on(CpuConfig(weight_dtype=storage))


def _in_8_bits(backend: CpuBackend) -> set[str]:
    return {name for name in STACKS if isinstance(getattr(backend._weights, name), Int8Panels)}


def _logits(backend: CpuBackend, tokens: torch.Tensor) -> list[NDArray[np.float32]]:
    adapters = [random_adapter(backend.spec, rank, ["q_proj", "down_proj"], rank, size=0.3) for rank in (3, 16)]
    return served_logits(backend, [None, *adapters], tokens)


@pytest.mark.parametrize("family", ["llama", "qwen2 window on upper layers"])
def test_auto_loses_no_bit_of_weights_on_grids(family: str, tmp_path: Path) -> None:
    model = put_on_grids(tiny_model(family))
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    tokens = random_tokens(model, 2, 37)
    logits = {}
    for storage in ("float32", "auto", "int8"):
        backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), _config(storage))
        assert _in_8_bits(backend) == (set() if storage == "float32" else STACKS)
        logits[storage] = _logits(backend, tokens)
        backend.close()
    np.testing.assert_array_equal(logits["auto"], logits["float32"])
    np.testing.assert_array_equal(logits["int8"], logits["float32"])


def test_one_weight_beside_its_grid_keeps_its_projection_in_float32(tmp_path: Path) -> None:
    """The last tensor of its stack: what was stored in 8 bits before it is taken back."""
    model = put_on_grids(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    off = {f"model.layers.{len(checkpoint.spec.layers) - 1}.mlp.up_proj.weight", "lm_head.weight"}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in sorted(checkpoint.tensors(), key=lambda named: named[0] in off):
            beside = np.zeros_like(tensor)
            beside[(-1,) * tensor.ndim] = 0.01
            yield name, tensor + beside if name in off else tensor

    tokens = random_tokens(model, 1, 21)
    exact, rounded = (CpuBackend(checkpoint.spec, tensors(), _config(storage)) for storage in ("float32", "int8"))
    auto = CpuBackend(checkpoint.spec, tensors(), _config("auto"))
    assert _in_8_bits(auto) == STACKS - {"gate_up", "head"}
    expected = _logits(exact, tokens)
    np.testing.assert_array_equal(_logits(auto, tokens), expected)
    assert _in_8_bits(rounded) == STACKS
    assert np.any(np.array(_logits(rounded, tokens)) != expected)
    for backend in (exact, rounded, auto):
        backend.close()


def test_auto_keeps_a_checkpoint_of_no_grid_in_float32(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    checkpoint = load_checkpoint(tmp_path)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    assert CONFIG.section(CpuConfig).weight_dtype == "auto"
    assert _in_8_bits(backend) == set()
    backend.close()
