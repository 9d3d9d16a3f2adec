"""The benchmark of mixtures on a tiny model: the engine, transformers and PEFT do the same work."""

from __future__ import annotations

import pytest

from load_tests.engine.bench_moe import Settings, run


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, on parameters as targets
def test_everybody_decodes_the_same_tokens() -> None:
    text = run(
        Settings(
            hidden=64, layers=2, experts=6, top_k=2, expert_size=32, streams=(1, 3), num_adapters=2, rank=3,
            num_prompt_tokens=5, num_tokens=4, num_reference_tokens=3, num_rounds=1, num_threads=1, seed=0,
        )
    )  # fmt: skip
    rows = [line for line in text.splitlines() if line.startswith("| ") and "streams" not in line]
    assert len(rows) == 2 * 5 + 2, text
    assert sum("of transformers" in row for row in rows) == sum("of PEFT" in row for row in rows) == 2
    # Two layers: attention, router, two of six experts for one stream; embeddings.
    attention = 64 * (64 + 2 * 64) + 64 * 64
    assert f"| 1 | {4 * (2 * (attention + 64 * 6 + 2 * 3 * 64 * 32) + 4096 * 64) / 1e6:.0f} |" in text
