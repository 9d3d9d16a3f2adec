"""The benchmark of arithmetics on a tiny model: a line for each number of streams, and one for the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.engine.bench_compute import Settings, run
from tests.engine.cpu.test_compute import save_on_grids


@pytest.mark.nightly  # compiling the decoder in integers takes most of a minute
def test_every_case_is_measured(tmp_path: Path) -> None:
    save_on_grids(tmp_path)
    text = run(Settings(tmp_path, (1, 3), 2, (4, 3), num_prompt_tokens=9, num_tokens=4, num_rounds=1, num_threads=1))
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    streams = ["1 streams", "3 streams", "1 streams, 2 adapters", "3 streams, 2 adapters"]
    assert [line[0] for line in lines] == [*streams, "prompt of 9 tokens"]
    assert all(float(line[1]) > 0 and len(line) == 4 for line in lines)
