"""A demo base model for transformers, and the token ids of a chat.

The base is a GGUF file, which only this module knows; the model is float32. Prompts go through the tokenizer's chat
template, exactly as the server renders them, and an answer ends with the base's end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from examples.training.task import ChatTurn

BASE_NAME = "SmolLM2-135M-Instruct"


def load_base(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, dequantised, on the CPU, and its tokenizer. Raises OSError for a missing file."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return model, tokenizer


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None = None, before: Sequence[ChatTurn] = ()
) -> list[int]:
    """Token ids of a conversation that ends in a user message, up to where the answer starts.

    `system` replaces the template's own.
    """
    messages = [{"role": role, "content": text} for role, text in (*before, ("user", prompt))]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def answer_ids(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """Token ids of an answer with the token that ends it."""
    ids: list[int] = tokenizer(f"{answer}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
    return ids
