"""Reference decoders: transformers, and PEFT's mixed batch, with a KV cache.

They read the same checkpoint file and adapter folders as the engine. The loop is as lean as these libraries allow: one
prefill, then one forward per token, logits of the last position only, no mask (all prompts are equally long), and
PEFT's hooks installed once per run, as its own `generate` does, not once per token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from load_tests.decoding import DecodeResult


def load_transformers(model: Path) -> Any:
    """The base in float32 on the CPU. Raises OSError for a missing file."""
    loaded: Any
    if model.is_file():
        loaded = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


class TransformersDecoder:
    """The base alone."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], num_tokens: int) -> DecodeResult:
        if any(index is not None for index in adapters):
            raise ValueError("transformers alone serves no adapters; use PeftDecoder")
        return _decode(self._model, prompts, num_tokens)


class PeftDecoder:
    """The base with adapters, mixed in one batch through PEFT's `adapter_names`."""

    def __init__(self, model: Any, folders: Sequence[Path]) -> None:
        """`model` is copied: PEFT rewrites the modules of the one it is given."""
        self._names = [f"adapter-{i}" for i in range(len(folders))]
        peft_model: Any = PeftModel.from_pretrained(copy.deepcopy(model), str(folders[0]), adapter_name=self._names[0])
        for name, folder in zip(self._names[1:], folders[1:], strict=True):
            peft_model.load_adapter(str(folder), adapter_name=name)
        self._model: Any = peft_model.eval()

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], num_tokens: int) -> DecodeResult:
        names = ["__base__" if index is None else self._names[index] for index in adapters]
        lora: Any = self._model.base_model
        with lora._enable_peft_forward_hooks(adapter_names=names):
            return _decode(lora, prompts, num_tokens)


@torch.inference_mode()
def _decode(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> DecodeResult:
    started = time.perf_counter()
    output = model(input_ids=torch.tensor([list(p) for p in prompts]), use_cache=True, logits_to_keep=1)
    tokens = [output.logits[:, -1].argmax(-1)]  # [B]
    opened = time.perf_counter()
    step_s = []
    for _ in range(num_tokens - 1):
        before = time.perf_counter()
        output = model(
            input_ids=tokens[-1][:, None], past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1
        )
        tokens.append(output.logits[:, -1].argmax(-1))
        step_s.append(time.perf_counter() - before)
    ids = torch.stack(tokens, dim=1).tolist()
    return DecodeResult(tuple(tuple(row) for row in ids), opened - started, tuple(step_s))
