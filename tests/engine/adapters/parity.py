"""PEFT as the judge: tiny random models, adapters it saves, and the logits it gives.

`peft_logits` loads the saved folder with PEFT itself. `our_logits` adds what we read to the base
model's linear layers by the plain formula y += b.T (a x). Nothing is shared between the two but the
base model and the files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from app.engine.adapters.lora import LoraAdapter
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from tests.engine.adapters.making import PATHS

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}
_FUSED_TARGETS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


def tiny_model(family: str, **changes: object) -> Any:
    """A random float32 model with weights large enough that every module matters."""
    config_class, model_class = _FAMILIES[family]
    return model_class(config_class(**(_SIZES | changes))).eval()


def spec_of(model: Any) -> ModelSpec:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    attention = AttentionSpec(
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        head_dim**-0.5,
        RopeSpec((1.0,) * (head_dim // 2)),
    )
    return ModelSpec(
        name=config.model_type,
        family=config.model_type,
        digest="a random model",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        layers=(LayerSpec(attention, MlpSpec(config.intermediate_size)),) * config.num_hidden_layers,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def save_random_adapter(model: Any, folder: Path, config: LoraConfig) -> None:
    """PEFT's own file of an adapter in which every trainable number is random."""
    peft_model = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif parameter.requires_grad:
                parameter.normal_(0, 0.15)
    peft_model.save_pretrained(folder)


def random_tokens(model: Any, num_sequences: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (num_sequences, length))


def base_logits(model: Any, tokens: torch.Tensor) -> NDArray[np.float32]:
    with torch.no_grad():
        logits: NDArray[np.float32] = model(input_ids=tokens).logits.numpy()
    return logits


def peft_logits(model: Any, folder: Path, tokens: torch.Tensor) -> NDArray[np.float32]:
    peft_model = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    return base_logits(peft_model, tokens)


def our_logits(model: Any, adapter: LoraAdapter, tokens: torch.Tensor) -> NDArray[np.float32]:
    with _applied(model, adapter):
        return base_logits(model, tokens)


@contextmanager
def _applied(model: Any, adapter: LoraAdapter) -> Iterator[None]:
    deltas = {(key.layer, key.target): pair for key, pair in adapter.weights.items()}
    modules = dict(model.named_modules())
    hooks = []
    paths = {path: (target,) for target, path in PATHS.items()} | _FUSED_TARGETS
    for layer in range(model.config.num_hidden_layers):
        for suffix, targets in paths.items():
            module = modules.get(f"model.layers.{layer}.{suffix}")
            pairs = [deltas.pop((layer, target), None) for target in targets] if module is not None else []
            if any(pair is not None for pair in pairs):
                hooks.append(module.register_forward_hook(_adding(pairs)))
    assert not deltas, f"nothing in the model takes {sorted(deltas)}"
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adding(pairs: list[Any]) -> Any:
    def add(_module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].numpy()  # [B, T, d_in]
        return output + torch.from_numpy(np.concatenate([(x @ pair.a.T) @ pair.b for pair in pairs], axis=-1))

    return add
