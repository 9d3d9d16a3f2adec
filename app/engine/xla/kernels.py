"""The LoRA kernel that the JAX engine's programs call, by `kernel_backend` and platform."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from jax import Array

from app.engine.errors import ConfigError
from app.kernels.sgmv import pallas, xla

_LOGGER = logging.getLogger(__name__)

#: See `app.kernels.sgmv.xla.add_deltas`.
AddDeltas = Callable[..., Array]


def lora_kernel(kernel_backend: str, platform: str) -> AddDeltas:
    """ConfigError for a platform that the kernel backend has no kernel for."""
    if kernel_backend == "xla":
        return xla.add_deltas
    if platform not in ("cpu", "tpu"):
        raise ConfigError(
            f"engine.xla.kernel_backend is 'pallas', a kernel for TPUs, but engine.xla.platform is {platform!r}; set "
            "kernel_backend: xla"
        )
    if platform == "cpu":
        _LOGGER.warning("engine.xla.kernel_backend is 'pallas' on a CPU: its kernel is interpreted, which is slow")
    return partial(pallas.add_deltas, interpret=platform == "cpu")
