"""From a checkpoint and `engine.device: cuda` to a running GPU backend, or to a sentence that says why not."""

from __future__ import annotations

import re

import torch

from app.engine.backend import Backend
from app.engine.config import EngineConfig
from app.engine.cuda.backend import GpuBackend
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights, plan and take memory, capture graphs. ConfigError for a device or setting not to be had."""
    device = cuda_device(config.device)
    if config.weight_storage == "int8":
        raise ConfigError(
            f"engine.weight_storage is {config.weight_storage!r}, which is for the CPU; on CUDA choose "
            "engine.cuda_dtype: bfloat16 or float32"
        )
    torch.cuda.set_device(device)
    try:
        return GpuBackend(checkpoint.spec, checkpoint.tensors(), config, device)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            f"engine.device is {config.device!r} but Triton is not installed: pip install polylora[triton]"
        ) from error


def cuda_device(name: str) -> torch.device:
    """cuda or cuda:N as a device that is there; ConfigError says what is missing."""
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"engine.device {name!r} is not one of cpu, cuda, cuda:0, cuda:1, ...")
    if not torch.backends.cuda.is_built():
        raise ConfigError(
            f"engine.device is {name!r} but torch {torch.__version__} was built without CUDA; install a CUDA build of "
            "torch, or set cpu"
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise ConfigError(
            f"engine.device is {name!r} but torch finds no CUDA device here; check the driver, or set cpu"
        )
    index = int(match[1] or 0)
    if index >= count:
        raise ConfigError(f"engine.device is {name!r} but there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)
