"""From a checkpoint to a running backend of the JAX engine, by device."""

from __future__ import annotations

import jax

from app.engine.backend import Backend
from app.engine.config import EngineConfig, XlaConfig
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.xla.backend import JaxBackend
from app.engine.xla.sharding import make_mesh


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights, allocate memory and compile. ConfigError for a device or setting that is not to be had."""
    xla = config.section(XlaConfig)
    try:
        devices = jax.devices(xla.platform)
    except RuntimeError as error:
        raise ConfigError(
            f"engine.xla.platform is {xla.platform!r} but JAX has no such device here: {error}"
        ) from error
    mesh = make_mesh(devices, xla.tensor_parallel, xla.expert_parallel)
    return JaxBackend(checkpoint.spec, checkpoint.tensors(), config, mesh)
