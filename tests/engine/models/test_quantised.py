"""Checkpoints that only vLLM reads: their modules are described, their weights are not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli.preflight import check_model
from app.config import AppConfig
from app.engine.config import EngineConfig
from app.engine.errors import CheckpointError, ConfigError
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from tests.engine.checkpoints import tiny_model

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj"


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def as_fp8(tensors: Tensors) -> Tensors:
    """As compressed-tensors and vLLM's own fp8 store it: the same shapes, and scales."""
    found = {name: value.to(torch.float8_e4m3fn) if is_linear(name) else value for name, value in tensors.items()}
    return found | {f"{name}_scale": torch.ones(1) for name in tensors if is_linear(name)}


def as_awq(tensors: Tensors) -> Tensors:
    """Eight numbers of four bits in one, transposed."""
    found = {name: value for name, value in tensors.items() if not is_linear(name)}
    for name, value in tensors.items():
        if is_linear(name):
            d_out, d_in = value.shape
            found[name.replace("weight", "qweight")] = torch.zeros(d_in, d_out // 8, dtype=torch.int32)
            found[name.replace("weight", "scales")] = torch.ones(1, d_out)
    return found


def quantise(folder: Path, method: str, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


@pytest.mark.parametrize(("method", "change"), [("fp8", as_fp8), ("awq", as_awq)])
def test_a_quantised_checkpoint_is_described(folder: Path, method: str, change: Callable[[Tensors], Tensors]) -> None:
    plain = load_checkpoint(folder, "tiny")
    quantise(folder, method, change)
    found = load_checkpoint(folder, "tiny")
    assert (plain.needs_vllm, method in found.needs_vllm) == ("", True)
    assert replace(found.spec, digest=plain.spec.digest) == plain.spec
    assert found.spec.digest != plain.spec.digest
    with pytest.raises(CheckpointError, match=rf"quantised \({method}\), which only engine\.vllm may read"):
        load_backend(found, EngineConfig())
    settings = AppConfig.model_validate({"model": {"uri": str(folder), "name": "tiny"}})
    with pytest.raises(ConfigError, match=r"set engine\.vllm"):
        check_model(settings, folder)
    with_vllm = AppConfig.model_validate({"model": settings.model, "engine": {"vllm": {"python": "python"}}})
    assert check_model(with_vllm, folder) == found.spec


def test_a_module_that_is_missing_or_has_another_shape_is_named(folder: Path) -> None:
    quantise(folder, "fp8", lambda tensors: as_fp8(tensors) | {f"{DOWN}.weight": torch.zeros(3, 5)})
    with pytest.raises(CheckpointError, match=rf"module '{DOWN}' has shape \[3, 5\]; the config implies"):
        load_checkpoint(folder)
    quantise(folder, "fp8", lambda tensors: {name: value for name, value in tensors.items() if DOWN not in name})
    with pytest.raises(CheckpointError, match=f"lacks '{DOWN}'"):
        load_checkpoint(folder)
