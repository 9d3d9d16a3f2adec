"""Which backend a configuration selects, and what is refused before anything is loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.engine.config import CpuConfig, CudaConfig, DeviceConfig, EngineConfig, XlaConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.cuda.memory import RANK_ALIGNMENT
from app.engine.errors import CheckpointError, ConfigError
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint
from app.kernels.sgmv.cpu import RANK_PANEL
from app.kernels.sgmv.xla import RANK_CHUNK
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec

SIZES: dict[str, Any] = {
    "num_kv_blocks": 8,
    "lora_pool_rows": 8,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
}


def checkpoint() -> Checkpoint:
    spec = tiny_spec()
    return Checkpoint(spec, Path("unused"), lambda: iter(random_tensors(spec)))


@pytest.mark.parametrize("device", [CpuConfig(), XlaConfig(skip_precompile=True)], ids=lambda device: device.name)
def test_the_configured_backend_is_loaded(device: DeviceConfig) -> None:
    backend = load_backend(checkpoint(), EngineConfig(**SIZES).on(device))
    assert type(backend).__module__ == f"app.engine.{device.name}.backend"
    assert backend.limits.num_kv_blocks == 8
    backend.close()


@pytest.mark.parametrize(
    ("xla", "message"),
    [
        ({"platform": "tpu"}, "engine.xla.platform is 'tpu' but JAX has no such device here"),
        ({"tensor_parallel": 3}, "engine.xla.tensor_parallel is 3 but JAX sees"),
    ],
)
def test_a_setting_that_cannot_be_had_is_refused_by_name(xla: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_backend(checkpoint(), EngineConfig(xla=XlaConfig(**xla, skip_precompile=True), **SIZES))


def test_what_only_the_cpu_computes_is_refused_by_name() -> None:
    spec = replace(tiny_spec(), family="gemma2", logit_softcap=30.0)
    with pytest.raises(CheckpointError, match=r"models of family 'gemma2' \(soft caps, .* run with engine\.cpu only"):
        load_backend(replace(checkpoint(), spec=spec), EngineConfig(**SIZES).on(XlaConfig()))


def test_a_backend_given_another_devices_section_says_which() -> None:
    with pytest.raises(ConfigError, match=r"engine\.xla is set, but this engine reads engine\.cpu"):
        CpuBackend(checkpoint().spec, checkpoint().tensors(), EngineConfig(xla=XlaConfig()))


def test_without_jax_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"engine.xla is set but jax is not installed: .*'polylora\[jax\]'"):
        load_backend(checkpoint(), EngineConfig(xla=XlaConfig()))


def test_runs_of_rank_rows_are_counted_as_each_engine_lays_them_out() -> None:
    assert EngineConfig().rank_alignment == RANK_PANEL
    assert EngineConfig(xla=XlaConfig()).rank_alignment == RANK_CHUNK
    assert EngineConfig(xla=XlaConfig(platform="gpu")).rank_alignment == RANK_CHUNK
    assert EngineConfig(cuda=CudaConfig(index=1)).rank_alignment == RANK_ALIGNMENT
