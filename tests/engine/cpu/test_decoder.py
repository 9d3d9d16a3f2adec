"""The CPU decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.engine.config import EngineConfig
from app.engine.cpu.backend import STEPS_AHEAD, CpuBackend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.checkpoints import FAMILIES, GEMMA, MIXTURES, save, tiny_model
from tests.engine.logits_check import NUM_BLOCKS, check_family, check_prompt_logprobs
from tests.kernels.machine.test_prefault import num_absent_pages

CONFIG = EngineConfig(num_kv_blocks=NUM_BLOCKS, lora_pool_rows=64, max_num_batched_tokens=256, max_num_seqs=8)
LENGTHS = (1, 37, 70)


@pytest.mark.parametrize("family", [*FAMILIES, *GEMMA, *MIXTURES])
def test_logits_equal_transformers_in_one_piece_and_in_chunks(family: str, tmp_path: Path) -> None:
    def make_backend(checkpoint: Checkpoint) -> CpuBackend:
        return CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)

    def chunk_end(generator: np.random.Generator, start: int) -> int:
        return min(LENGTHS[2], start + int(generator.integers(1, 30)))

    check_family(family, tmp_path, make_backend, LENGTHS, chunk_end)


def test_kv_memory_is_taken_as_tokens_come_and_ahead_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint = load_checkpoint(save(tiny_model("llama"), tmp_path))
    config = CONFIG.model_copy(update={"num_kv_blocks": 32768})
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), config)
    layers = [*backend._k_memory, *backend._v_memory]
    assert layers[0].nbytes > 1 << 25, "so large that it cannot be what a former array has left"
    num_ahead = STEPS_AHEAD * config.max_num_batched_tokens // config.block_size
    for block in (0, 20_000):
        backend.forward(
            forward_batch([Piece(np.array([1], np.int32), 0, np.array([block], np.int32))], config.block_size)
        )
        backend._kv_pages.wait()
        assert all(num_absent_pages(layer[: block + 1 + num_ahead]) == 0 for layer in layers)
        assert all(num_absent_pages(layer[block + 2000 :]) > 0 for layer in layers)
    backend.close()


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmoe"])
def test_log_probabilities_of_prompts_equal_transformers(family: str, tmp_path: Path) -> None:
    def make_backend(checkpoint: Checkpoint) -> CpuBackend:
        return CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)

    check_prompt_logprobs(family, tmp_path, make_backend)
