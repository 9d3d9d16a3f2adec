"""The demo model's logits against transformers on the same GGUF file: real weights, real text.

By day against a file of what transformers gave, because loading the model there takes 15 s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from app.engine.config import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from load_tests.engine.steps import Piece, forward_batch
from tests.seeds import rng

CONFIG = EngineConfig(num_kv_blocks=32, lora_pool_rows=0, max_num_batched_tokens=256, max_num_seqs=4)
TEXTS = (
    "SELECT name FROM customers WHERE",
    "你好，世界 🎉 def f(x):\n    return x ** 2\n\n\n",
    "The quick brown fox jumps over the lazy dog. " * 8,
)


#: What transformers gives for the last token of each prompt, one logit of `EVERY`.
GOLDEN = Path(__file__).parents[2] / "data" / "demo_logits.npy"
EVERY = 32
#: Largest difference from transformers' logits: float32 with another order of sums.
TOLERANCE = 1e-4


def prompts_of(gguf: Path) -> list[NDArray[np.int64]]:
    tokenizer = load_tokenizer(gguf)
    chat = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    return [np.array(tokenizer.encode(text, add_special_tokens=False)) for text in (*TEXTS, chat)]


@pytest.fixture(scope="module")
def logits(demo_gguf: Path) -> NDArray[np.float32]:
    """Ours, for the last token of each prompt: [4, V]."""
    checkpoint, prompts = load_checkpoint(demo_gguf), prompts_of(demo_gguf)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    tables = rng().permutation(32).reshape(4, 8)
    pieces = [Piece(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    backend.forward(forward_batch(pieces, CONFIG.block_size))
    found = backend.logits(4).copy()
    backend.close()
    return found


def test_demo_logits_are_those_that_transformers_gave(logits: NDArray[np.float32]) -> None:
    expected = np.load(GOLDEN)
    assert np.abs(expected).max() > 5
    assert np.abs(logits[:, ::EVERY] - expected).max() <= TOLERANCE


@pytest.mark.nightly
def test_demo_logits_equal_transformers(
    logits: NDArray[np.float32], demo_gguf: Path, demo_transformers: PreTrainedModel
) -> None:
    """All of them, and those in the file. To write it again: `np.save(GOLDEN, expected[:, ::EVERY])`."""
    with torch.no_grad():
        rows = [demo_transformers(torch.tensor(prompt[None])).logits[0, -1].numpy() for prompt in prompts_of(demo_gguf)]
    expected = np.stack(rows)
    assert np.abs(logits - expected).max() <= TOLERANCE
    assert np.abs(np.load(GOLDEN) - expected[:, ::EVERY]).max() <= TOLERANCE
