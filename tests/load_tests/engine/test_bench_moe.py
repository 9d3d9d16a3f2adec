"""The benchmark of mixtures on a tiny model: the engine, transformers and PEFT do the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.engine.bench_moe import Case, Measurement, Settings, report, run
from tests.load_tests.engine.test_vllm_reference import write_stand_in

SETTINGS = Settings(
    hidden=64, layers=2, experts=6, top_k=2, expert_size=32, streams=(1, 3), num_adapters=2, rank=3,
    num_prompt_tokens=5, num_tokens=4, num_reference_tokens=3, num_rounds=1, num_threads=1, seed=0,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, on parameters as targets
def test_everybody_decodes_the_same_tokens() -> None:
    text = run(SETTINGS)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "streams" not in line]
    assert len(rows) == 2 * 5 + 2, text
    assert sum("of transformers" in row for row in rows) == sum("of PEFT" in row for row in rows) == 2
    # Two layers: attention, router, two of six experts for one stream; embeddings.
    attention = 64 * (64 + 2 * 64) + 64 * 64
    assert f"| 1 | {4 * (2 * (attention + 64 * 6 + 2 * 3 * 64 * 32) + 4096 * 64) / 1e6:.0f} |" in text


def test_vllm_takes_part_and_its_tokens_are_compared(tmp_path: Path) -> None:
    """A stand-in says its prompt's last token where vLLM would compute."""
    settings = replace(SETTINGS, streams=(2,), num_adapters=0, vllm=write_stand_in(tmp_path))
    with pytest.raises(SystemExit, match="vLLM, eager and the engine chose other first tokens for 2 streams"):
        run(settings)


def test_vllm_has_a_rate_beside_the_engines_and_no_time_of_this_process() -> None:
    found = {
        Case("engine", 0, 1): [Measurement(10.0, 2.0)],
        Case("vLLM, eager", 0, 1): [Measurement(4.0, float("nan"))],
    }
    lines = report(SETTINGS, found, [1e9], {1: 1e6}).splitlines()
    assert [line for line in lines if "vLLM" in line and line.startswith("|")] == [
        "| 1 | vLLM, eager | 0 | 4.0 | 0.40 (0.40 to 0.40) of engine |  |  |"
    ]
