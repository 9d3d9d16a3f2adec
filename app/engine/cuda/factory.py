"""From a checkpoint and the section `engine.cuda` to a running GPU backend, or to a sentence that says why not."""

from __future__ import annotations

import torch

from app.engine.backend import Backend
from app.engine.config import CudaConfig, EngineConfig
from app.engine.cuda.backend import CudaBackend
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights, plan and take memory, capture graphs. ConfigError for a device or setting not to be had."""
    device = cuda_device(config.section(CudaConfig).index)
    torch.cuda.set_device(device)
    return CudaBackend(checkpoint.spec, checkpoint.tensors(), config, device)


def cuda_device(index: int) -> torch.device:
    """The GPU with this number; ConfigError says what is missing."""
    if not torch.backends.cuda.is_built():
        raise ConfigError(
            f"engine.cuda is set but torch {torch.__version__} was built without CUDA; install a CUDA build of torch, "
            "or leave engine.cuda out"
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise ConfigError(
            "engine.cuda is set but torch finds no CUDA device here; check the driver, or leave engine.cuda out"
        )
    if index >= count:
        raise ConfigError(f"engine.cuda.index is {index} but there are {count} CUDA devices, 0 to {count - 1}")
    return torch.device("cuda", index)
