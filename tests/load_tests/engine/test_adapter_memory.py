"""What the pages say adapters take is what the command prints, and that is what the engine counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.engine.models.hf.config import spec_from_config
from load_tests.engine.adapter_memory import CASES, MODELS, report, sizes

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "adapter-memory.md"


def test_the_page_has_the_table() -> None:
    assert report() in PAGE.read_text()


def test_the_page_says_what_every_expert_in_every_slot_would_take() -> None:
    config = MODELS["DeepSeek-V2-Lite"]
    hidden, wide, layers = config["hidden_size"], config["moe_intermediate_size"], config["num_hidden_layers"] - 1
    values = (hidden + 2 * wide) + (wide + hidden)  # of each rank: an a and a b for gate and up together, and for down
    dense = f"{2 * layers * config['n_routed_experts'] * 16 * values / 1e6:.1f} MB"
    assert f"every expert of DeepSeek-V2-Lite would take {dense}" in PAGE.read_text()


def test_an_adapter_pays_for_its_experts_and_for_the_modules_that_it_changes() -> None:
    spec = spec_from_config(MODELS["DeepSeek-V2-Lite"], "lite", "")
    every, some = (sizes(case, spec, np.float32) for case in CASES if case.model == "DeepSeek-V2-Lite")
    heads = 4 * 27 * 16 * (2 * 512 + 16 * (128 + 128))  # of kv_b_proj, by head: keys and values have its a once each
    assert every.rank_rows == some.rank_rows
    assert every.extra - heads == 8 * (some.extra - heads)
    few, small, every, large = (
        sizes(case, spec_from_config(MODELS[case.model], "", ""), np.float32) for case in CASES[:4]
    )
    for found in (small, every, large):
        assert found.every_module == found.rank_rows == found.used
    assert few.every_module == every.rank_rows
    assert few.used <= few.rank_rows == every.rank_rows // 4
