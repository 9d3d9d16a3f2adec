"""The benchmark of merged weights on a tiny model: a line for each batch and number of adapters that it can have."""

from __future__ import annotations

from pathlib import Path

from load_tests.engine.bench_merge import Settings, run
from tests.engine.adapters.parity import tiny_model


def test_every_case_is_measured(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    settings = Settings(tmp_path, (1, 3), (1, 2), rank=4, num_prompt_tokens=3, num_tokens=3, num_rounds=1)
    lines = [line.split(" | ") for line in run(settings).splitlines() if line.startswith("|")][2:]
    assert [(line[0], line[1]) for line in lines] == [("| 1", "1"), ("| 3", "1"), ("| 3", "2")]
    assert all(float(cell) > 0 for line in lines for cell in line[2:5])
