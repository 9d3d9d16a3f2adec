"""The CPU decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.engine.config import EngineConfig
from app.engine.models.checkpoint import Checkpoint
from app.engine.torch_backend.cpu_backend import CpuBackend
from tests.engine.logits_check import NUM_BLOCKS, check_family
from tests.engine.torch_backend.checkpoints import FAMILIES

CONFIG = EngineConfig(num_kv_blocks=NUM_BLOCKS, adapter_rank_rows=64, max_batch_tokens=256, max_batch_sequences=8)
LENGTHS = (1, 37, 70)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_one_piece_and_in_chunks(family: str, tmp_path: Path) -> None:
    def make_backend(checkpoint: Checkpoint) -> CpuBackend:
        return CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)

    def chunk_end(generator: np.random.Generator, start: int) -> int:
        return min(LENGTHS[2], start + int(generator.integers(1, 30)))

    check_family(family, tmp_path, make_backend, LENGTHS, chunk_end)
