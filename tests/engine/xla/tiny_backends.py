"""Tiny JAX backends with fresh random weights, and a count of what XLA compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax

from app.engine.config import EngineConfig
from app.engine.models.spec import AttentionSpec, ModelSpec, RopeSpec
from app.engine.xla.backend import XlaBackend
from app.engine.xla.sharding import make_mesh
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec
from tests.engine.batch_invariance import mixture_spec


def tiny_backend(config: EngineConfig, spec: ModelSpec | None = None, tensor_parallel: int = 1) -> XlaBackend:
    spec = spec or tiny_spec()
    return XlaBackend(spec, random_tensors(spec), config, make_mesh(jax.devices("cpu"), tensor_parallel))


def divisible_mixture() -> ModelSpec:
    """`mixture_spec` with as many heads as two tensor shards of two, or of three, expert shards can share."""
    spec = mixture_spec()
    rope = RopeSpec((1.0, 0.1, 0.01, 0.001))
    attention = AttentionSpec(12, 12, 8, 8**-0.5, rope, qk_norm=True, whole_qk_norm=True)
    return replace(spec, layers=tuple(replace(layer, attention=attention) for layer in spec.layers))


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
