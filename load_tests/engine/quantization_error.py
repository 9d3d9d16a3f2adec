"""Effect of 8-bit base weights: tokens and log-probabilities of demo prompts, compared with float32.

Every held-out prompt of the demo tasks is answered greedily with each `engine.weight_dtype`; "changed" counts answers
with another token anywhere, and differences of log-probabilities are those of the chosen tokens, up to and with the
first changed one.

    python -m load_tests.engine.quantization_error --prompts 32 --tokens 32
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from app.engine.request import GenerateRequest, SamplingParams
from examples.training.recipes import RECIPES
from examples.training.task import examples


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens and the log-probability of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def answers(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int, weight_dtype: Literal["auto", "float32", "int8"]
) -> list[Answer]:
    """One per prompt; CheckpointError if the model cannot be served."""
    longest = max(map(len, prompts)) + num_tokens
    config = EngineConfig(
        cpu=CpuConfig(weight_dtype=weight_dtype),
        lora_pool_rows=0,
        num_kv_blocks=16 * (longest // 16 + 2),
        max_num_seqs=16,
        max_queued_requests=len(prompts),
        max_model_len=longest,
    )
    backend = load_backend(load_checkpoint(model), config)
    engine = Engine(backend, config)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, num_logprobs=0)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(str(index), "bench", tuple(prompt), sampling), None)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    while engine.has_work:
        for chunk in engine.step():
            if chunk.error is not None:
                raise chunk.error
            tokens[int(chunk.request_id)] += chunk.token_ids
            logprobs[int(chunk.request_id)] += [entry.logprob for entry in chunk.logprobs]
    backend.close()
    return [Answer(tuple(ids), tuple(values)) for ids, values in zip(tokens, logprobs, strict=True)]


def row(name: str, found: Sequence[Answer], exact: Sequence[Answer]) -> str:
    """The table's line for one way to store weights; `exact` are the answers of float32 storage."""
    num_changed = sum(ours.token_ids != theirs.token_ids for ours, theirs in zip(found, exact, strict=True))
    differences: list[float] = []
    for ours, theirs in zip(found, exact, strict=True):
        same = [a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=False)]
        compared = same.index(False) + 1 if False in same else len(same)
        differences += np.abs(np.subtract(ours.logprobs[:compared], theirs.logprobs[:compared])).tolist()
    return f"| {name} | {num_changed} of {len(exact)} | {max(differences):.2g} | {np.mean(differences):.2g} |"


def run(model: Path, num_prompts: int, num_tokens: int) -> str:
    """The Markdown table, for `num_prompts` prompts of each demo task."""
    tokenizer = load_tokenizer(model)
    held_out = [e for recipe in RECIPES.values() for e in examples(recipe.task, "heldout", num_prompts, 0)]
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": example.prompt}]), add_special_tokens=False)
        for example in held_out
    ]
    exact = answers(model, prompts, num_tokens, "float32")
    lines = [
        "| weight_dtype | answers changed | largest difference of a log-probability | mean |",
        "|---|---:|---:|---:|",
        *(row(name, answers(model, prompts, num_tokens, name), exact) for name in ("auto", "int8")),
    ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="What storing base weights in 8 bits changes in answers.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--prompts", type=int, default=32, help="of each demo task")
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    print(run(resolve_model(arguments.model), arguments.prompts, arguments.tokens))


if __name__ == "__main__":
    main()
