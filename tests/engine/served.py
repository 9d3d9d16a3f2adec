"""Logits of a real engine for adapters, at every position, all of them in one batch if asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from app.engine.adapters.adapter import LoraAdapter
from app.engine.config import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.pools.adapter_pool import AdapterPool
from load_tests.engine.steps import Piece, forward_batch, greedy
from tests.engine.logits_check import BackendWithLogits

CONFIG = EngineConfig(
    num_kv_blocks=256, lora_pool_rows=512, max_loras=64, max_num_batched_tokens=1024, max_num_seqs=1024
)


def backend_of(model: Any, folder: Path, config: EngineConfig = CONFIG) -> CpuBackend:
    """The engine's backend for a transformers model, through its files."""
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(folder)
    return CpuBackend(checkpoint.spec, checkpoint.tensors(), config)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of words beside a tiny model: "w5" is token 5."""
    backend = tokenizers.Tokenizer(WordLevel({f"w{index}": index for index in range(99)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))


def served_logits(
    backend: BackendWithLogits, adapters: Sequence[LoraAdapter | None], tokens: torch.Tensor
) -> list[NDArray[np.float32]]:
    """Per adapter (None: the base) `[B, T, V]` for the same tokens `[B, T]`; one forward for all of them."""
    width = -(-tokens.shape[1] // CONFIG.block_size)
    pieces, block, limits = [], 0, backend.limits
    pool = AdapterPool(limits.lora_pool_rows, limits.rank_alignment, len(adapters) + 1)
    for index, adapter in enumerate(adapters):
        if adapter is not None:
            grant = pool.acquire(str(index), limits.rank_rows_of(adapter))
            assert grant is not None, "there are rank rows for all of them"
            backend.write_adapter(index + 1, grant.row_start, adapter)
        for row in tokens.numpy():
            pieces.append(Piece(row, 0, np.arange(block, block + width), index + 1 if adapter is not None else 0))
            block += width
    batch = forward_batch(pieces, CONFIG.block_size)
    count = len(batch.token_ids)
    every = np.arange(count, dtype=np.int32)
    seqs = np.repeat(np.arange(len(pieces), dtype=np.int32), np.diff(batch.query_starts))
    backend.forward(replace(batch, sample_rows=every, sample_seqs=seqs, sampling=greedy(count)))
    logits = backend.logits(count).reshape(len(pieces), tokens.shape[1], -1).copy()
    order = sorted(range(len(pieces)), key=lambda i: pieces[i].adapter_slot)  # as `forward_batch` sorts
    places = np.argsort(order)
    return list(logits[places].reshape(len(adapters), *tokens.shape, -1))
