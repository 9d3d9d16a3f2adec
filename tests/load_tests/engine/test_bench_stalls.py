"""The stalls benchmark on a tiny model: every line is measured, nothing fails, and cold adapters are really written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from load_tests.engine.bench_stalls import Settings, run
from tests.engine.checkpoints import save, tiny_model


def test_every_line_is_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = Settings(
        save(tiny_model("llama"), tmp_path / "model"),
        num_streams=6,
        num_steps=60,
        rank=8,
        num_adapters=50,
        num_resident=8,
        num_requests=30,
        num_tokens=4,
        popularity="uniform",
        num_rounds=2,
        num_threads=1,
    )
    text = run(settings)
    values = re.findall(r"\| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|", text)
    assert len(values) == 4
    assert all(0 < float(low) <= float(middle) <= float(high) for middle, low, high in values)
    different, written = (int(value) for value in re.findall(r"(\d+) (?:different|written)", text))
    assert 8 < different <= 30
    assert written >= different - 8, "at most what was left from the round before was resident"
