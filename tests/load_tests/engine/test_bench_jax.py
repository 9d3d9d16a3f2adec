"""The JAX benchmark on a tiny model: everybody is given the same work, and every line is measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from load_tests.engine.bench_jax import Settings, run
from tests.engine.checkpoints import save, tiny_model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
def test_everybody_is_given_the_same_work(tmp_path: Path) -> None:
    torch.manual_seed(0)  # rules out near-ties
    settings = Settings(
        model=save(tiny_model("llama"), tmp_path / "model"),
        streams=(1, 5),
        num_adapters=3,
        ranks=(8, 3),
        num_prompt_tokens=7,
        num_tokens=10,
        num_reference_tokens=6,
        num_rounds=2,
        seed=1,
        with_reference=True,
    )
    text = run(settings)
    # The base and three adapters, with one and five streams.
    assert "tokens: JAX engine 12 of 12, transformers 6 of 6, PEFT mixed batch 6 of 6." in text
    rates = re.findall(r"\| ([\d.]+) \| ([\d.]+) \|\n", text)
    assert len(rates) == 6
    assert all(float(rate) > 0 for pair in rates for rate in pair)
    assert len(re.findall(r"to [\d.]+\) \| [\d.]+ \(", text)) == 6
