"""From a checkpoint to a running backend of the JAX engine, by device."""

from __future__ import annotations

import jax

from app.engine.backend import Backend
from app.engine.config import EngineConfig
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.xla.backend import JaxBackend
from app.engine.xla.sharding import make_mesh

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights, allocate memory and compile. ConfigError for a device or setting that is not to be had."""
    if config.num_threads:
        raise ConfigError(
            f"engine.num_threads is {config.num_threads} but XLA takes every core the process may use; "
            "set 0 and limit the process instead (taskset, or the container)"
        )
    platform = _PLATFORMS.get(config.device)
    if platform is None:
        raise ConfigError(f"engine.device {config.device!r} is not one of {', '.join(_PLATFORMS)}")
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(f"engine.device is {config.device!r} but JAX has no such device here: {error}") from error
    return JaxBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(devices, config.tensor_parallel))
