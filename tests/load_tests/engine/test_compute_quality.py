"""The quality of rounded products: float32's log-probabilities are transformers', and perplexities are theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.engine.config import CpuConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from load_tests.engine.compute_quality import (
    ARITHMETICS,
    WINDOW,
    config_of,
    divergence,
    log_probabilities,
    token_windows,
)
from tests.engine.cpu.test_compute import save_on_grids
from tests.engine.served import write_tokenizer


@pytest.mark.nightly  # compiling the decoder in integers takes most of a minute
def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    model = save_on_grids(tmp_path)
    write_tokenizer(tmp_path)
    windows = token_windows(tmp_path, 2 * WINDOW + 9)
    assert windows.shape == (2, WINDOW)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.from_numpy(windows.astype(np.int64))).logits, -1).numpy()
    checkpoint = load_checkpoint(tmp_path)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), config_of(CpuConfig()))
    for window, rows in zip(windows, expected, strict=True):
        np.testing.assert_allclose(log_probabilities(backend, window), rows, atol=1e-4)
    backend.close()
    losses = [-rows[np.arange(WINDOW - 1), window[1:]] for window, rows in zip(windows, expected, strict=True)]
    lines = divergence(tmp_path, 2 * WINDOW + 9, list(ARITHMETICS)[1:]).splitlines()
    names = [line.partition(" (")[0].split(" in ", 2)[2] for line in lines]
    assert names == ["int8", "bfloat16", "float32, KV in bfloat16"]
    for line in lines:
        count, _, _, perplexity, *_ = line.split()
        assert int(count) == 510
        assert float(perplexity) == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
