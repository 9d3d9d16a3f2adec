"""The error of stored weights: counted per answer, compared up to the first token that differs."""

from __future__ import annotations

from pathlib import Path

from load_tests.engine.quantization_error import Answer, answers, row
from tests.engine.checkpoints import save, tiny_model
from tests.seeds import rng


def test_differences_count_up_to_and_with_the_first_changed_token() -> None:
    exact = [Answer((1, 2, 3), (-1.0, -1.0, -1.0)), Answer((4, 5), (-2.0, -2.0))]
    found = [Answer((1, 9, 3), (-1.25, -1.5, -9.0)), Answer((4, 5), (-2.0, -2.0))]
    assert row("int8", found, exact) == "| int8 | 1 of 2 | 0.5 | 0.19 |"
    assert row("auto", exact, exact) == "| auto | 0 of 2 | 0 | 0 |"


def test_answers_are_the_prompts_own(tmp_path: Path) -> None:
    model = save(tiny_model("llama"), tmp_path / "model")
    prompts = rng().integers(3, 90, (5, 7)).tolist()
    together = answers(model, prompts, 6, "float32")
    assert together == [answers(model, [prompt], 6, "float32")[0] for prompt in prompts]
    assert all(len(a.logprobs) == len(a.token_ids) <= 6 and max(a.logprobs) <= 0 for a in together)
