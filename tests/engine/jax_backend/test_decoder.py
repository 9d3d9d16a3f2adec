"""The JAX decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from app.engine.config import EngineConfig
from app.engine.jax_backend.backend import JaxBackend
from app.engine.jax_backend.sharding import make_mesh
from app.engine.models.checkpoint import Checkpoint
from tests.engine.logits_check import NUM_BLOCKS, check_family
from tests.engine.torch_backend.checkpoints import FAMILIES

CONFIG = EngineConfig(
    num_kv_blocks=NUM_BLOCKS, adapter_rank_rows=8, max_batch_tokens=64, max_batch_sequences=8, skip_precompile=True
)
LENGTHS = (1, 20, 41)


@pytest.mark.parametrize("form", ["cpu", "xla"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_one_piece_and_in_chunks(family: str, form: str, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"jax_form": form})

    def make_backend(checkpoint: Checkpoint) -> JaxBackend:
        return JaxBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))

    def chunk_end(generator: np.random.Generator, start: int) -> int:
        """At least two tokens each: one program for everything."""
        end = min(LENGTHS[2], start + int(generator.integers(2, 20)))
        return LENGTHS[2] if end == LENGTHS[2] - 1 else end

    check_family(family, tmp_path, make_backend, LENGTHS, chunk_end)
