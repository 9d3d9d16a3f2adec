"""The JAX decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from app.engine.config import EngineConfig
from app.engine.jax_backend.backend import JaxBackend
from app.engine.jax_backend.sharding import make_mesh
from app.engine.models.checkpoint import load_checkpoint
from tests.engine.torch_backend.checkpoints import FAMILIES, save, tiny_model
from tests.engine.torch_backend.steps import Piece, forward_batch

CONFIG = EngineConfig(
    num_kv_blocks=64, adapter_rank_rows=8, max_batch_tokens=64, max_batch_sequences=8, skip_precompile=True
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_one_piece_and_in_chunks(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    checkpoint = load_checkpoint(save(model, tmp_path / "model"))
    backend = JaxBackend(checkpoint.spec, checkpoint.tensors(), CONFIG, make_mesh(jax.devices("cpu"), 1))
    generator = np.random.default_rng()
    prompts = [generator.integers(3, 99, n) for n in (1, 20, 41)]
    tables = generator.permutation(64)[:15].reshape(3, 5)
    with torch.no_grad():
        expected = [model(torch.tensor(p[None])).logits[0].numpy() for p in prompts]

    whole = forward_batch([Piece(p, 0, t) for p, t in zip(prompts, tables, strict=True)], CONFIG.block_size)
    output = backend.forward(whole)
    last = np.stack([e[-1] for e in expected])
    assert np.abs(backend.logits(3) - last).max() <= 1e-4
    assert output.token_ids.tolist() == last.argmax(1).tolist()

    fresh = generator.permutation(64)[:5]
    at = 0
    while at < 41:  # at least two tokens each: one program for everything
        end = min(41, at + int(generator.integers(2, 20)))
        end = 41 if end == 40 else end
        backend.forward(forward_batch([Piece(prompts[2][at:end], at, fresh)], CONFIG.block_size))
        assert np.abs(backend.logits(1)[0] - expected[2][end - 1]).max() <= 1e-4
        at = end
