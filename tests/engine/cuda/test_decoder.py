"""The GPU decoder against transformers, family by family; and how many base products a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.cuda.backend import CudaBackend
from app.engine.models.checkpoint import Checkpoint
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.checkpoints import FAMILIES, MIXTURES
from tests.engine.cuda.gpu import ON_CUDA, gpu_backend, gpu_backend_of_checkpoint, gpu_config
from tests.engine.logits_check import NUM_BLOCKS, check_family, check_prompt_logprobs
from tests.seeds import rng

LENGTHS = (1, 37, 70)


@pytest.mark.parametrize(
    ("family", "batch_invariant"),
    [
        # Each family by day in one of the modes, by turns.
        *((family, bool(index % 2)) for index, family in enumerate(FAMILIES)),
        *(pytest.param(family, not index % 2, marks=pytest.mark.nightly) for index, family in enumerate(FAMILIES)),
        *((family, False) for family in MIXTURES),
        ("gpt_oss", True),
        ("deepseek_v2 query latents", True),
        ("olmoe", True),  # of experts the products are the same in both modes
    ],
)
def test_logits_equal_transformers_in_one_piece_and_in_chunks(
    family: str, batch_invariant: bool, tmp_path: Path
) -> None:
    config = gpu_config(num_kv_blocks=NUM_BLOCKS, lora_pool_rows=64, batch_invariant=batch_invariant)

    def make_backend(checkpoint: Checkpoint) -> CudaBackend:
        return gpu_backend_of_checkpoint(checkpoint, config)

    def chunk_end(generator: np.random.Generator, start: int) -> int:
        return min(LENGTHS[2], start + int(generator.integers(1, 30)))

    check_family(family, tmp_path, make_backend, LENGTHS, chunk_end)


class _CountProducts(TorchDispatchMode):
    """Products that read one of the given weights, counted per weight."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.counts = dict.fromkeys((weight.data_ptr() for weight in weights), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        aten = torch.ops.aten
        if func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_, aten.linear):
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self.counts:
                    self.counts[tensor.data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_tokens", [1, 11])
def test_one_base_product_per_module_whatever_adapters_the_batch_holds(num_tokens: int) -> None:
    spec = tiny_spec()
    backend = gpu_backend(spec, random_tensors(spec), gpu_config())
    for slot, rank in enumerate((1, 16, 8, 40), 1):
        backend.write_adapter(slot, 64 * (slot - 1), random_adapter(spec, rank))
    generator = rng()
    pieces = [Piece(generator.integers(3, 60, num_tokens), 0, np.arange(i, i + 1), i) for i in range(5)]
    weights = backend._weights
    base = [weight for layer in weights.layers for weight in layer.modules.values()]
    with _CountProducts([*base, weights.head]) as counting:
        backend.forward(forward_batch(pieces, backend.limits.block_size))
    assert len(counting.counts) == 4 * len(spec.layers) + 1
    # On a GPU the first use of a decode step's graph runs it twice: to warm up, and to be captured.
    assert set(counting.counts.values()) == {2 if num_tokens == 1 and ON_CUDA else 1}
    backend.close()


def test_bfloat16_is_near_float32() -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec)
    backends = [gpu_backend(spec, tensors, gpu_config(dtype=dtype)) for dtype in ("float32", "bfloat16")]
    generator = rng()
    pieces = [Piece(generator.integers(3, 60, 11), 0, np.arange(i, i + 1), i) for i in range(3)]
    adapters = [random_adapter(spec, rank, size=0.05) for rank in (8, 24)]
    logits = []
    for backend in backends:
        for slot, adapter in enumerate(adapters, 1):
            backend.write_adapter(slot, 32 * slot, adapter)
        backend.forward(forward_batch(pieces, backend.limits.block_size))
        logits.append(backend.logits(3).copy())
        backend.close()
    error = np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0])
    assert 0 < error < 3e-2


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_log_probabilities_of_prompts_equal_transformers(family: str, tmp_path: Path) -> None:
    def make_backend(checkpoint: Checkpoint) -> CudaBackend:
        return gpu_backend_of_checkpoint(checkpoint, gpu_config(num_kv_blocks=NUM_BLOCKS, lora_pool_rows=64))

    check_prompt_logprobs(family, tmp_path, make_backend)
