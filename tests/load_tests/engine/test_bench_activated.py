"""The benchmark of activated LoRA on a tiny model: both lines are measured, on what the base has cached."""

from __future__ import annotations

import re
from pathlib import Path

from load_tests.engine.bench_activated import Settings, run
from tests.engine.adapters.parity import tiny_model
from tests.engine.served import write_tokenizer


def test_both_are_measured(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=128, max_position_embeddings=256).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    line = run(Settings(tmp_path, lengths=(50,), rank=4, num_rounds=2)).splitlines()[-1]
    assert line.startswith("| 50 | ")
    assert len(re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", line)) == 3
