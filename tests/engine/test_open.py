"""Which backend a configuration selects, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.engine.config import EngineConfig
from app.engine.cuda.memory import RANK_ALIGNMENT
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.open import load_backend
from app.kernels.sgmv.cpu import RANK_PANEL
from app.kernels.sgmv.xla import RANK_CHUNK
from tests.engine.adapters.making import random_tensors, tiny_spec

SIZES: dict[str, Any] = {
    "num_kv_blocks": 8,
    "adapter_rank_rows": 8,
    "max_batch_tokens": 16,
    "max_batch_sequences": 2,
    "skip_precompile": True,
}


def checkpoint() -> Checkpoint:
    spec = tiny_spec()
    return Checkpoint(spec, Path("unused"), lambda: iter(random_tensors(spec)))


@pytest.mark.parametrize(("name", "folder"), [("torch", "cpu"), ("jax", "xla")])
def test_the_configured_backend_is_loaded(name: str, folder: str) -> None:
    backend = load_backend(checkpoint(), EngineConfig(backend=name, **SIZES))  # type: ignore[arg-type]
    assert type(backend).__module__ == f"app.engine.{folder}.backend"
    assert backend.limits.num_kv_blocks == 8
    backend.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "torch", "tensor_parallel": 2}, "tensor_parallel is 2 but the torch engine"),
        ({"backend": "jax", "num_threads": 2}, "num_threads is 2 but XLA"),
        (
            {"backend": "jax", "jax_form": "xla", "weight_storage": "int8"},
            "weight_storage is 'int8' .* form 'xla' keeps",
        ),
        ({"backend": "jax", "device": "abacus"}, "'abacus' is not one of"),
        ({"backend": "jax", "device": "tpu"}, "no such device here"),
        ({"backend": "jax", "tensor_parallel": 3}, "tensor_parallel is 3 but JAX sees"),
    ],
)
def test_a_setting_that_cannot_be_had_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_backend(checkpoint(), EngineConfig(**settings, **SIZES))


def test_runs_of_rank_rows_are_counted_as_each_engine_lays_them_out() -> None:
    assert EngineConfig().rank_alignment == RANK_PANEL
    assert EngineConfig(backend="jax").rank_alignment == RANK_CHUNK
    assert EngineConfig(backend="jax", device="cuda").rank_alignment == RANK_CHUNK
    assert EngineConfig(device="cuda:1").rank_alignment == RANK_ALIGNMENT
