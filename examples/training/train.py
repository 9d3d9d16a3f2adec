"""Trains one demo adapter with PEFT on the CPU and writes it as a PEFT folder in bfloat16.

The loss covers answer tokens only; prompts are rendered as the server renders them. `evaluate.py` measures the result.

    python -m examples.training.train sql --gguf path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.training.base import BASE_NAME, answer_ids, load_base, prompt_ids
from examples.training.recipes import RECIPES, Recipe
from examples.training.task import examples

NUM_TRAIN_EXAMPLES = 2000
WARMUP_STEPS = 10
CARD = """---
base_model: {base}
library_name: peft
license: {license_id}
tags: [lora]
---
# {name}

{description}

Made by `python -m {command}`; pass rates are in `docs/get-started/demo-adapters.md`.
"""


class PackedBatch(NamedTuple):
    """B chats in one row of T tokens; the tokens all prompts start with are computed once.

    mask is additive [1, 1, T, T]: a chat sees the common start and itself, nothing of its neighbours.
    """

    token_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64
    mask: torch.Tensor  # [1, 1, T, T] float32
    predict_rows: torch.Tensor  # [A] int64, rows whose next token is an answer token
    labels: torch.Tensor  # [A] int64


def pack(chats: list[tuple[list[int], list[int]]]) -> PackedBatch:
    """One row from (prompt ids, answer ids) pairs, with positions and mask that keep the chats apart."""
    prompts = [prompt for prompt, _ in chats]
    num_common = 0
    while num_common < min(map(len, prompts)) - 1 and len({prompt[num_common] for prompt in prompts}) == 1:
        num_common += 1
    token_ids, positions = prompts[0][:num_common], list(range(num_common))
    owners = [-1] * num_common
    predict_rows: list[int] = []
    labels: list[int] = []
    for owner, (prompt, answer) in enumerate(chats):
        chat = (prompt + answer)[num_common:-1]  # nothing follows the last token, so it is only a label
        first_predict = len(token_ids) + len(prompt) - num_common - 1
        predict_rows.extend(range(first_predict, first_predict + len(answer)))
        labels.extend(answer)
        token_ids = token_ids + chat
        positions.extend(range(num_common, num_common + len(chat)))
        owners.extend([owner] * len(chat))
    owner_of = torch.tensor(owners)
    sees = (owner_of[None, :] == owner_of[:, None]) | (owner_of[None, :] == -1)  # [T, T]
    mask = torch.full(sees.shape, torch.finfo(torch.float32).min).masked_fill(sees.tril(), 0.0)
    return PackedBatch(
        torch.tensor([token_ids]),
        torch.tensor([positions]),
        mask[None, None],
        torch.tensor(predict_rows),
        torch.tensor(labels),
    )


def answer_loss(model: PeftModel, batch: PackedBatch) -> torch.Tensor:
    """Mean cross entropy of the answer tokens; logits are computed for those rows only."""
    decoder: Any = model.get_base_model()
    hidden = decoder.model(
        input_ids=batch.token_ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state[0, batch.predict_rows]  # [A, H]
    return torch.nn.functional.cross_entropy(decoder.lm_head(hidden), batch.labels)


def train(recipe: Recipe, gguf: Path, *, in_bfloat16: bool = False) -> PeftModel:
    """The trained model on the demo base: `fit`."""
    return fit(recipe, *load_base(gguf), in_bfloat16=in_bfloat16)


def fit(
    recipe: Recipe, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, in_bfloat16: bool = False
) -> PeftModel:
    """The trained model. Prints the loss every ten steps.

    `in_bfloat16`: products in it, which some CPUs do several times as fast; weights stay float32.
    """
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.use_rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config).train()
    chats = [
        (
            prompt_ids(tokenizer, example.prompt, recipe.task.system, example.before),
            answer_ids(tokenizer, example.answer),
        )
        for example in examples(recipe.task, "train", NUM_TRAIN_EXAMPLES, recipe.seed)
    ]
    rng = Random(recipe.seed)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.num_steps))
    started = time.monotonic()
    for step in range(1, recipe.num_steps + 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            loss = answer_loss(model, pack(rng.sample(chats, recipe.batch_size)))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(
                f"step {step}/{recipe.num_steps} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True
            )
    return model


def save(
    model: PeftModel,
    description: str,
    folder: Path,
    *,
    base_name: str = BASE_NAME,
    license_id: str = "apache-2.0",
    command: str | None = None,
) -> None:
    """Write the PEFT folder: bfloat16 weights, a card, and the base under its public name, never a local path.

    `command`: the module that makes this adapter, and its arguments; None: this one.
    """
    model.peft_config["default"].base_model_name_or_path = base_name
    model.save_pretrained(str(folder), save_embedding_layers=False)  # "auto" would ask the model hub for the base
    weights_path = folder / "adapter_model.safetensors"
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in load_file(weights_path).items()}
    save_file(weights, weights_path, metadata={"format": "pt"})
    made_by = f"examples.training.train {folder.name}" if command is None else command
    card = CARD.format(
        name=folder.name, base=base_name, license_id=license_id, description=description, command=made_by
    )
    (folder / "README.md").write_text(card)


def _rate(step: int, num_steps: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train one demo adapter.")
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file of the demo base")
    parser.add_argument("--out", type=Path, default=Path("examples/adapters"), help="folder of the adapter folders")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16; weights stay float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = RECIPES[arguments.recipe]
    save(
        train(recipe, arguments.gguf, in_bfloat16=arguments.bfloat16),
        recipe.task.description,
        arguments.out / arguments.recipe,
    )


if __name__ == "__main__":
    main()
