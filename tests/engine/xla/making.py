"""Tiny JAX backends with fresh random weights, and a count of what XLA compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from app.engine.config import EngineConfig
from app.engine.models.spec import ModelSpec
from app.engine.xla.backend import JaxBackend
from app.engine.xla.sharding import make_mesh
from tests.engine.adapters.making import random_tensors, tiny_spec


def tiny_backend(config: EngineConfig, spec: ModelSpec | None = None, tensor_parallel: int = 1) -> JaxBackend:
    spec = spec or tiny_spec()
    return JaxBackend(spec, random_tensors(spec), config, make_mesh(jax.devices("cpu"), tensor_parallel))


class CompileCount:
    """How many programs XLA has compiled since it was made."""

    def __init__(self) -> None:
        self.num_compiled = 0

    def __call__(self, event: str, _duration_s: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.num_compiled += 1


@contextmanager
def counting_compilations() -> Iterator[CompileCount]:
    count = CompileCount()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
