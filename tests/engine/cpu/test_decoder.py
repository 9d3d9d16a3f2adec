"""The CPU decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from app.engine.config import EngineConfig
from app.engine.cpu.backend import STEPS_AHEAD, CpuBackend
from app.engine.cpu.lora_memory import AHEAD_BYTES
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter
from tests.engine.batch_invariance import dense_spec, grid_tensors
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


def _resident_bytes() -> int:
    """This process's memory, of the machine."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_an_idle_engines_memory_shrinks_and_comes_again() -> None:
    """After a burst that has used nearly all KV blocks and rank rows; what is kept has its bits."""
    spec = dense_spec()
    config = CONFIG.model_copy(update={"num_kv_blocks": 16384, "lora_pool_rows": 1 << 15, "max_loras": 3})
    backend = CpuBackend(spec, grid_tensors(spec, 1), config)
    layers = [*backend._k_memory, *backend._v_memory]
    tokens = np.arange(3, 40, dtype=np.int32)

    def logits(adapter_slot: int, blocks: tuple[int, ...], first: int = 0) -> np.ndarray:
        piece = Piece(tokens[first:], first, np.array(blocks, np.int32), adapter_slot)
        backend.forward(forward_batch([piece], config.block_size))
        return backend.logits(1).copy()

    adapters = [random_adapter(spec, 16, ["q_proj", "down_proj"], seed) for seed in (1, 2)]
    rows = [backend.limits.rank_rows_of(adapter) for adapter in adapters]
    backend.write_adapter(1, 8, adapters[0])
    backend.write_adapter(2, config.lora_pool_rows - rows[1], adapters[1])
    kept, burst = (15_000, 1, 2), (16_383, 16_000, 10_000)
    expected = [logits(1, kept), logits(2, kept), logits(2, burst)][1:]
    backend._kv_pages.wait()
    backend._rows._pages.wait()
    before = _resident_bytes()
    kept_rows = [(8, 8 + rows[0]), (config.lora_pool_rows - rows[1], config.lora_pool_rows)]
    assert backend.trim_memory(kept, kept_rows, lambda: False)
    size = sum(layer.nbytes for layer in layers) + backend._rows.memory.nbytes
    assert size > 1 << 28
    assert before - _resident_bytes() > size - AHEAD_BYTES - (32 << 20), "all but what is kept and what comes next"
    np.testing.assert_array_equal(logits(2, kept, first=32), expected[0], "of blocks and rows that were kept")
    np.testing.assert_array_equal(logits(2, (3, 4, 5)), expected[1], "in blocks that were not")
    backend.write_adapter(1, 16_000, adapters[1])
    np.testing.assert_array_equal(logits(1, burst), expected[1], "of rows that were not")
    backend._kv_pages.wait()
    assert all(num_absent_pages(layer) == 0 for layer in layers)
    backend.close()


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmoe"])
def test_log_probabilities_of_prompts_equal_transformers(family: str, tmp_path: Path) -> None:
    def make_backend(checkpoint: Checkpoint) -> CpuBackend:
        return CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)

    check_prompt_logprobs(family, tmp_path, make_backend)
