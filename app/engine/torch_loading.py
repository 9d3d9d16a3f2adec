"""From a checkpoint to a running backend of the torch engine, by device."""

from __future__ import annotations

from app.engine.backend import Backend
from app.engine.config import EngineConfig
from app.engine.models.checkpoint import Checkpoint


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights and allocate KV memory and adapter tables. ConfigError for a device that is not there."""
    if config.device == "cpu":
        from app.engine.cpu.backend import CpuBackend

        return CpuBackend(checkpoint.spec, checkpoint.tensors(), config)
    from app.engine.cuda import loading as gpu_loading

    return gpu_loading.load_backend(checkpoint, config)
