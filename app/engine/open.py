"""The configured backend for a checkpoint: the one place that knows which backends there are.

In: a checkpoint and the engine's settings. Out: a `Backend`, its memory allocated and its programs compiled or
compiling. A backend's libraries are imported here, when it is chosen, in the process that computes.
"""

from __future__ import annotations

from app.engine.backend import Backend
from app.engine.config import EngineConfig
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """CheckpointError or ConfigError if the model or a setting is not for this backend or machine."""
    config.check_installed()
    if config.backend == "jax":
        from app.engine.xla import loading as jax_loading

        return jax_loading.load_backend(checkpoint, config)
    if config.tensor_parallel != 1:
        raise ConfigError(
            f"engine.tensor_parallel is {config.tensor_parallel} but the torch engine uses one device; "
            "set 1, or engine.backend: jax"
        )
    from app.engine import torch_loading

    return torch_loading.load_backend(checkpoint, config)
