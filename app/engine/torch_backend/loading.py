"""From a checkpoint to a running backend of the torch engine, by device."""

from __future__ import annotations

from app.engine.backend import Backend
from app.engine.config import EngineConfig
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights and allocate KV memory and adapter tables. ConfigError for an unknown device."""
    if config.device == "cpu":
        from app.engine.torch_backend.cpu_backend import CpuBackend

        return CpuBackend(checkpoint.spec, checkpoint.tensors(), config)
    raise ConfigError(f"engine.device {config.device!r} is not available in this version; use 'cpu'")
