"""The demo base with a demo adapter merged into it, as `polylora merge` writes it: text and logits of all who run it.

The truth is PEFT's adapter beside the base in float64. How far float32 leads from it is measured in transformers with
the folder; everybody may be four times as far off, for it is the largest of millions of differences. Texts are the same
as long as the truth's best token is ahead by more than that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from app.cli.main import main
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.formats.reading import read_adapter
from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import SamplingParams
from examples.training.recipes import RECIPES
from examples.training.task import examples
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.served import served_logits

pytestmark = [*PEFT_WARNINGS, pytest.mark.nightly]  # half a gigabyte is written, and loaded several times

SQL = Path(__file__).parents[2] / "examples" / "adapters" / "sql"
NUM_PROMPTS, NUM_TOKENS = 10, 48
CONFIG = EngineConfig(num_kv_blocks=64, lora_pool_rows=32, max_num_batched_tokens=256, max_num_seqs=256)


class Answer(NamedTuple):
    """A prompt's greedy tokens, and their text without the one that ended it."""

    tokens: list[int]
    text: str


def by_us(model: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    with LLM(model, EngineConfig()) as llm:
        found = llm.generate(prompts, adapter, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    return [Answer(list(one.token_ids), one.text) for one in found]


def by_transformers(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        tokens = out[0, len(prompt) :].tolist()
        answers.append(Answer(tokens, tokenizer.decode(tokens, skip_special_tokens=True)))
    return answers


def logits_of(model: Any, tokens: Sequence[int]) -> NDArray[np.float64]:
    with torch.no_grad():
        logits: NDArray[np.float64] = model(torch.tensor([list(tokens)])).logits[0].double().numpy()
    return logits


def our_logits(model: Path, adapter: LoraAdapter | None, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    checkpoint = load_checkpoint(model)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    found = [served_logits(backend, [adapter], torch.tensor([list(tokens)]))[0][0] for tokens in texts]
    backend.close()
    return found


def largest(found: Sequence[NDArray[Any]], truth: Sequence[NDArray[np.float64]]) -> float:
    """The largest difference of any logit."""
    return max(float(np.abs(one - true).max()) for one, true in zip(found, truth, strict=True))


def assert_same_text(ours: Answer, theirs: Answer, margins: NDArray[np.float64], least: float) -> None:
    """Up to a token at which the truth's two best are so near that rounding may choose between them."""
    if ours.tokens == theirs.tokens:
        assert ours.text == theirs.text
        return
    at = next(n for n, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if one != other)
    assert margins[at] <= least


def test_merged_and_beside_the_base_are_the_same_model(
    demo_gguf: Path, demo_transformers: PreTrainedModel, tmp_path: Path
) -> None:
    assert main(["merge", str(SQL), str(tmp_path / "merged"), "--base", str(demo_gguf)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    held_out = examples(RECIPES["sql"].task, "heldout", NUM_PROMPTS, 0)
    chats = [[{"role": "user", "content": example.prompt}] for example in held_out]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    theirs = by_transformers(merged, tokenizer, prompts)
    assert any(answer.text.startswith("SELECT") for answer in theirs)
    beside, within = by_us(demo_gguf, SQL, prompts), by_us(tmp_path / "merged", None, prompts)
    base = by_us(demo_gguf, None, prompts)
    assert all(one.text != other.text for one, other in zip(base, theirs, strict=True))

    texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, theirs, strict=True)]
    exact = PeftModel.from_pretrained(copy.deepcopy(demo_transformers), SQL, autocast_adapter_dtype=False).double()
    truth = [logits_of(exact, text) for text in texts]
    bound = 4 * largest([logits_of(merged, text) for text in texts], truth)
    assert bound < 1e-3, "float32 tells next to all tokens apart"
    adapter = read_adapter(SQL, load_checkpoint(demo_gguf).spec)
    assert largest(our_logits(demo_gguf, adapter, texts), truth) <= bound
    assert largest(our_logits(tmp_path / "merged", None, texts), truth) <= bound
    for prompt, answer, true, *ours in zip(prompts, theirs, truth, beside, within, strict=True):
        best = np.sort(true[len(prompt) - 1 : -1], axis=1)
        for one in ours:
            assert_same_text(one, answer, best[:, -1] - best[:, -2], 2 * bound)
