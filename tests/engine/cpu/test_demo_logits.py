"""The demo model's logits against transformers on the same GGUF file: real weights, real text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from app.engine.config import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.tokenizer import load_tokenizer
from load_tests.engine.steps import Piece, forward_batch
from tests.seeds import rng

CONFIG = EngineConfig(num_kv_blocks=32, adapter_rank_rows=0, max_batch_tokens=256, max_batch_sequences=4)
TEXTS = (
    "SELECT name FROM customers WHERE",
    "你好，世界 🎉 def f(x):\n    return x ** 2\n\n\n",
    "The quick brown fox jumps over the lazy dog. " * 8,
)


def test_demo_logits_equal_transformers(demo_gguf: Path, demo_transformers: PreTrainedModel) -> None:
    checkpoint, tokenizer = load_checkpoint(demo_gguf), load_tokenizer(demo_gguf)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    chat = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    prompts = [np.array(tokenizer.encode(text, add_special_tokens=False)) for text in (*TEXTS, chat)]
    tables = rng().permutation(32).reshape(4, 8)
    pieces = [Piece(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    backend.forward(forward_batch(pieces, CONFIG.block_size))
    with torch.no_grad():
        expected = np.stack([demo_transformers(torch.tensor(p[None])).logits[0, -1].numpy() for p in prompts])
    assert np.abs(expected).max() > 5
    assert np.abs(backend.logits(4) - expected).max() <= 1e-4
    backend.close()
