"""The benchmark of long prompts on a tiny model: prompts arrive beside streams, and every line is measured."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from load_tests.engine.bench_long_prompts import Settings, run
from tests.engine.checkpoints import save, tiny_model


def test_every_line_is_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = save(tiny_model("llama"), tmp_path / "model")
    settings = Settings(
        model, num_streams=2, prompt_tokens=32, num_prompts=2, seconds_apart=0.02, num_rounds=2, num_threads=1
    )
    lines = [line for line in run(settings).splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| nothing arrives", "| prompts, target_step_ms 0", "| prompts, target_step_ms 100",
    ]  # fmt: skip
    spreads = [re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", line) for line in lines]
    assert [len(of_line) for of_line in spreads] == [2, 3, 3]
    assert all(0 < float(low) <= float(middle) <= float(high) for middle, low, high in spreads[1][:2] + spreads[2][:2])
