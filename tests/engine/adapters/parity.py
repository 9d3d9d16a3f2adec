"""PEFT as the judge: tiny random models, adapters it saves, and the logits it gives.

`peft_logits` loads the saved folder with PEFT itself. `our_logits` adds what we read to the base
model's linear layers by the plain formula y += b.T (a x). Nothing is shared between the two but the
base model and the files.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from app.kernels.dora.reference import dora_scale
from tests.engine.adapters.random_adapters import PATHS

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


def fused_twin(model: Any) -> Any:
    """A Phi-3 that computes what a tiny Qwen2 does: the same weights, with q/k/v and gate/up in one module each."""
    config = {name: getattr(model.config, name) for name in (*_SIZES, "tie_word_embeddings", "rope_parameters")}
    twin = Phi3ForCausalLM(Phi3Config(**config, rms_norm_eps=model.config.rms_norm_eps)).eval()
    state = model.state_dict()
    for layer in range(model.config.num_hidden_layers):
        for suffix, targets in _FUSED_TARGETS.items():
            parent, name = f"model.layers.{layer}.{suffix}".rsplit(".", 1)
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{parent}.{target}.{kind}", None) for target in targets]
                if parts[0] is not None:
                    module = twin.get_submodule(f"{parent}.{name}")
                    setattr(module, kind, torch.nn.Parameter(torch.cat(parts)))
                    state[f"{parent}.{name}.{kind}"] = torch.cat(parts)
    twin.load_state_dict(state)
    return twin


def spec_of(model: Any) -> ModelSpec:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    has_bias = config.model_type == "qwen2"
    attention = AttentionSpec(
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        head_dim**-0.5,
        RopeSpec((1.0,) * (head_dim // 2)),
        qkv_bias=has_bias,
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
    with torch.no_grad():
        return base_logits(_applied(model, adapter), tokens)


def _applied(model: Any, adapter: LoraAdapter) -> Any:
    """A copy of `model` that does what `adapter` says, by plain formulas in hooks."""
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # untied: values only
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in adapter.replaced.items():
            parameters[name].copy_(torch.from_numpy(values.copy()))
        for name, (token_ids, rows) in adapter.token_rows.items():
            matrix = {"embed_tokens": model.model.embed_tokens, "lm_head": model.lm_head}[name].weight
            matrix[list(token_ids)] = torch.from_numpy(rows.copy())
    modules = dict(model.named_modules())
    left = set(adapter.weights)
    paths = {path: (target,) for target, path in PATHS.items()} | _FUSED_TARGETS
    for layer in range(model.config.num_hidden_layers):
        for suffix, targets in paths.items():
            module = modules.get(f"model.layers.{layer}.{suffix}")
            keys = [LoraKey(layer, target) for target in targets]
            if module is not None and left.intersection(keys):
                left.difference_update(keys)
                module.register_forward_hook(_adding(adapter, keys))
    assert not left, f"nothing in the model takes {sorted(left)}"
    for name, pair in adapter.outer.items():
        if name == "embed_tokens":
            model.model.embed_tokens.register_forward_hook(_looking_up(pair))
        else:
            model.lm_head.register_forward_hook(_multiplying(pair))
    return model


def _adding(adapter: LoraAdapter, keys: list[LoraKey]) -> Any:
    def add(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].numpy()  # [B, T, d_in]
        pairs = [adapter.weights[key] for key in keys]
        delta = np.concatenate([(x @ pair.a.T) @ pair.b for pair in pairs], axis=-1)
        if keys[0] in adapter.delta_biases:
            delta = delta + np.concatenate([adapter.delta_biases[key] for key in keys])
        if keys[0] in adapter.magnitudes:
            weights = np.split(module.weight.numpy(), np.cumsum([pair.b.shape[1] for pair in pairs])[:-1])
            scales = [
                dora_scale(adapter.magnitudes[key], weight, pair.a, pair.b)
                for key, weight, pair in zip(keys, weights, pairs, strict=True)
            ]
            bias = module.bias if module.bias is not None else torch.zeros(1)
            return (output - bias + torch.from_numpy(delta)) * torch.from_numpy(np.concatenate(scales)) + bias
        return output + torch.from_numpy(delta)

    return add


def _multiplying(pair: LoraPair) -> Any:
    return lambda _, inputs, output: output + torch.from_numpy((inputs[0].numpy() @ pair.a.T) @ pair.b)


def _looking_up(pair: LoraPair) -> Any:
    return lambda _, inputs, output: output + torch.from_numpy(pair.a.T[inputs[0].numpy()] @ pair.b)
