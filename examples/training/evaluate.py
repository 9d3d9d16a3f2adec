"""Measures a demo adapter on held-out prompts, compared with the base without and with instructions.

Prints one Markdown table row per adapter, and the answers that failed. Greedy decoding, the whole answer checked,
nothing cleaned up before the check. Three columns: the base given the same prompt, the base with the task explained in
a system message, the adapter.

    python -m examples.training.evaluate sql --gguf path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.training.base import load_base, prompt_ids
from examples.training.recipes import RECIPES
from examples.training.task import Example, Task, examples

BATCH_SIZE = 16
HEADER = (
    "| adapter | prompts | base | base, with instructions | adapter | known wordings | new wordings |\n"
    "|---|---|---|---|---|---|---|"
)


@torch.inference_mode()
def answers(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Example],
    max_new_tokens: int,
    system: str | None = None,
) -> list[str]:
    """Greedy answers in the order of the prompts, without the token that ends them."""
    end = tokenizer.eos_token_id
    generate: Any = model.generate  # transformers and peft do not share a typed interface
    found: list[str] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        rows = [prompt_ids(tokenizer, one.prompt, system, one.before) for one in prompts[start : start + BATCH_SIZE]]
        width = max(map(len, rows))
        padded = torch.tensor([[end] * (width - len(row)) + row for row in rows])  # [B, T]
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])  # [B, T]
        output = generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=end,
            eos_token_id=end,
        )
        found.extend(tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))
    return found


def failures(task: Task, held_out: Sequence[Example], texts: Sequence[str]) -> dict[str, str]:
    """Why each failing prompt failed, with what was answered."""
    reasons = ((example, text, task.check(example, text)) for example, text in zip(held_out, texts, strict=True))
    return {example.prompt: f"{reason}: {text!r}" for example, text, reason in reasons if reason is not None}


def _rate(held_out: Sequence[Example], failed: dict[str, str]) -> str:
    passed = sum(example.prompt not in failed for example in held_out)
    return f"{passed}/{len(held_out)} ({100 * passed / len(held_out):.0f} %)"


def evaluate(name: str, folder: Path, gguf: Path, num_prompts: int, seed: int) -> str:
    """The table row of one adapter; prints the adapter's failures. Raises OSError for missing files."""
    return row(RECIPES[name].task, folder, *load_base(gguf), num_prompts, seed)


def row(
    task: Task,
    folder: Path,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    seed: int,
) -> str:
    """The table row of the adapter in `folder` on a base that is loaded; prints the adapter's failures."""
    held_out = examples(task, "heldout", num_prompts, seed)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    tuned = failures(task, held_out, answers(model, tokenizer, held_out, task.max_new_tokens, task.system))
    with model.disable_adapter():
        plain = failures(task, held_out, answers(model, tokenizer, held_out, task.max_new_tokens, task.system))
        instructed = failures(
            task, held_out, answers(model, tokenizer, held_out, task.max_new_tokens, task.instructions)
        )
    for prompt, reason in tuned.items():
        print(f"  failed: {prompt!r}: {reason}")
    known = [example for example in held_out if example.wording == "known"]
    new = [example for example in held_out if example.wording == "new"]
    rates = [_rate(held_out, plain), _rate(held_out, instructed), _rate(held_out, tuned)]
    return f"| `{task.name}` | {num_prompts} | " + " | ".join([*rates, _rate(known, tuned), _rate(new, tuned)]) + " |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Pass rates of the demo adapters on held-out prompts.")
    parser.add_argument("adapters", nargs="*", default=sorted(RECIPES), help="recipe names, all by default")
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file of the demo base")
    parser.add_argument("--folder", type=Path, default=Path("examples/adapters"), help="folder of the adapter folders")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [
        evaluate(name, arguments.folder / name, arguments.gguf, arguments.num_prompts, arguments.seed)
        for name in arguments.adapters
    ]
    print("\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
