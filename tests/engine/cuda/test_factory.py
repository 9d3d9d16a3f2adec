"""What the section `engine.cuda` needs, and what is said where it is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from app.engine.cuda.backend import cuda_device
from app.engine.errors import ConfigError
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec
from tests.engine.cuda.gpu import gpu_config


def _checkpoint() -> Checkpoint:
    spec = tiny_spec()
    return Checkpoint(spec, Path("unused"), lambda: iter(random_tensors(spec)))


def _pretend(monkeypatch: pytest.MonkeyPatch, *, built: bool, count: int) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("index", "built", "count", "message"),
    [
        (0, False, 0, "engine.cuda is set but torch .* was built without CUDA"),
        (1, True, 0, "engine.cuda is set but torch finds no CUDA device"),
        (2, True, 2, "engine.cuda.index is 2 but there are 2 CUDA devices, 0 to 1"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(
    index: int, built: bool, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, built=built, count=count)
    with pytest.raises(ConfigError, match=message):
        load_backend(_checkpoint(), gpu_config(index=index))


def test_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, built=True, count=2)
    assert cuda_device(0) == torch.device("cuda", 0)
    assert cuda_device(1) == torch.device("cuda", 1)


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_what_is_not_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ConfigError, match=rf"engine.cuda is set but {missing} is not installed: .*'polylora\[cuda\]'"):
        load_backend(_checkpoint(), gpu_config())
