"""Tiny random checkpoints of each model family, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

_SIZES = {
    "vocab_size": 99,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28}

_DEEPSEEK = {
    "num_key_value_heads": None,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 6,
    "v_head_dim": 16,
}

#: name -> (configuration class, settings beyond `_SIZES`)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama tied, biased": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 10}),
    "llama rope linear": ("LlamaConfig", _rope(rope_type="linear", factor=4.0)),
    "llama rope llama3": (
        "LlamaConfig",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama rope yarn": (
        "LlamaConfig",
        _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral window": ("MistralConfig", {"sliding_window": 19}),
    "mistral no window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 window on upper layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", {}),
}
#: The same for mixtures of experts.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": ("MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 19}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _EXPERTS | {"shared_expert_intermediate_size": 52, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen2_moe every other layer": (
        "Qwen2MoeConfig",
        _EXPERTS
        | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2}
        | {"qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe plain shares": ("Qwen3MoeConfig", _EXPERTS | {"attention_bias": True, "mlp_only_layers": [0, 2]}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 10}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 19}),
    "gpt_oss yarn": (
        "GptOssConfig",
        {"num_local_experts": 5, "sliding_window": 9, "swiglu_limit": 0.5, "attention_bias": False}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
        | _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        _DEEPSEEK
        | {"n_routed_experts": 8, "q_lora_rank": None, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 2.5, "n_shared_experts": 2},
    ),
    "deepseek_v2 query latents": (
        "DeepseekV2Config",
        _DEEPSEEK
        | {"n_routed_experts": 9, "q_lora_rank": 20, "topk_method": "group_limited_greedy"}
        | {"n_group": 3, "topk_group": 2, "attention_bias": True, "num_attention_heads": 5}
        | {"hidden_size": 40, "n_shared_experts": 1}
        | _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.6),
    ),
}


#: Of these the CPU engine computes what the others do not; norms multiply by 1 + w.
GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {"sliding_window": 19, "query_pre_attn_scalar": 40}),
    "gemma2 small caps": (
        "Gemma2Config",
        {"sliding_window": 30, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 21, "num_hidden_layers": 4, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
    "gemma3 rope linear": (
        "Gemma3TextConfig",
        {
            "sliding_window": 21,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def tiny_model(family: str, **changes: int) -> torch.nn.Module:
    """A float32 model with fresh random weights, biases and norms included, in evaluation mode."""
    config_class, settings = (FAMILIES | GEMMA | MIXTURES)[family]
    config = getattr(transformers, config_class)(**{**_SIZES, **settings, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.dim() == 1 and parameter.shape[0] in (40, 24, 10, 20)
            centre = 1.0 if family not in GEMMA and is_norm else 0.0
            parameter.copy_(centre + torch.randn_like(parameter) * 0.15)
    return model


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def without_end(folder: Path) -> Path:
    """The same folder, whose model ends no answer: a random one may do so at any token."""
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.exists():
            file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": None}))
    return folder
