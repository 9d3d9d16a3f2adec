"""What `engine.device: cuda` needs, and what is said where it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.cuda import loading as gpu_loading
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.open import load_backend
from tests.engine.adapters.making import random_tensors, tiny_spec
from tests.engine.cuda.gpu import gpu_config


def _checkpoint() -> Checkpoint:
    spec = tiny_spec()
    return Checkpoint(spec, Path("unused"), lambda: iter(random_tensors(spec)))


def _pretend(monkeypatch: pytest.MonkeyPatch, *, built: bool, count: int) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("device", "built", "count", "message"),
    [
        ("cuda", False, 0, "'cuda' but torch .* was built without CUDA"),
        ("cuda:1", True, 0, "'cuda:1' but torch finds no CUDA device"),
        ("cuda:2", True, 2, "'cuda:2' but there are 2 CUDA devices, cuda:0 to cuda:1"),
        ("rocm", True, 1, "'rocm' is not one of cpu, cuda"),
        ("cuda:x", True, 1, "'cuda:x' is not one of cpu, cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(
    device: str, built: bool, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, built=built, count=count)
    with pytest.raises(ConfigError, match=message):
        load_backend(_checkpoint(), gpu_config(device=device))


def test_names_of_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, built=True, count=2)
    assert gpu_loading.cuda_device("cuda") == torch.device("cuda", 0)
    assert gpu_loading.cuda_device("cuda:1") == torch.device("cuda", 1)


def test_a_setting_for_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, built=True, count=1)
    with pytest.raises(ConfigError, match=r"weight_storage is 'int8', which is for the CPU.*cuda_dtype"):
        load_backend(_checkpoint(), gpu_config(device="cuda", weight_storage="int8"))


def test_without_triton_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_triton(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    _pretend(monkeypatch, built=True, count=1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(gpu_loading, "GpuBackend", no_triton)
    with pytest.raises(ConfigError, match="Triton is not installed: pip install polylora"):
        load_backend(_checkpoint(), gpu_config(device="cuda"))
