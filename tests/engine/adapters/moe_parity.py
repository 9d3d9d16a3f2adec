"""Tiny random mixtures of experts, adapters that PEFT saves of them, and adapters in older layouts.

`PeftModel` loads every folder itself and is the judge: one adapter at a time, for PEFT mixes none of these.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from app.engine.adapters.formats.reading import read_adapter
from tests.engine.adapters.parity import base_logits, random_tokens
from tests.engine.logits_check import BackendWithLogits
from tests.engine.served import served_logits

TOLERANCE = 1e-5
PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's own use
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, on parameters as targets
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 5,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 4,
    "v_head_dim": 32,
}
_QWEN = {"moe_intermediate_size": 20, "num_experts": 5, "norm_topk_prob": True}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_SIZES, **_QWEN, shared_expert_intermediate_size=28, mlp_only_layers=[0]),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_QWEN, head_dim=16),
    "olmoe": lambda: OlmoeConfig(**_SIZES, num_experts=4),
    "gpt_oss": lambda: GptOssConfig(**_SIZES, num_local_experts=4, head_dim=8, sliding_window=9),
    "deepseek_v2": lambda: DeepseekV2Config(**_SIZES | _LATENT, q_lora_rank=None),
    "deepseek_v2 query latents": lambda: DeepseekV2Config(**_SIZES | _LATENT, q_lora_rank=12),
}
#: With latents these select q_proj, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj and o_proj.
ATTENTION = r".*\.self_attn\..*_proj(_with_mqa)?"
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: What is asked of PEFT, by name.
FORMATS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION, "r": 4},
    "all experts": {"target_modules": [], "target_parameters": PARAMETERS, "r": 3},
    "all-linear": {"target_modules": "all-linear", "r": 2, "lora_alpha": 5},
    "only gate_up": {"target_modules": ["o_proj"], "target_parameters": PARAMETERS[:1], "r": 4},
    "only down": {"target_modules": [], "target_parameters": ["down_proj"], "r": 9},
    "router and experts": {
        "target_modules": ["v_proj", "kv_b_proj"],
        "target_parameters": ["gate.weight", "gate_up_proj", "down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 3, "gate.weight": 1},
        "alpha_pattern": {r".*\.down_proj": 7},
        "use_rslora": True,
    },
}


def tiny_mixture(family: str, **changes: int) -> Any:
    """A random float32 model whose experts and router matter, in evaluation mode."""
    config = FAMILIES[family]()
    config.update(changes)
    return AutoModelForCausalLM.from_config(config).float().eval()


def save_random(model: Any, folder: Path, settings: dict[str, Any]) -> None:
    """PEFT's own file of an adapter in which every trainable number is random."""
    if model.config.model_type == "gpt_oss":
        settings = json.loads(json.dumps(settings).replace("gate.weight", "router.weight"))
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **settings)
    peft_model = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    peft_model.save_pretrained(folder)


def edit(folder: Path, *, tensors: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: object) -> None:
    """Change an adapter's file and its configuration in place."""
    if tensors is not None:
        held = load_file(folder / "adapter_model.safetensors")
        tensors(held)
        save_file({key: value.contiguous() for key, value in held.items()}, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def names_of_old(model: Any) -> tuple[tuple[str, str, str], str]:
    """What an expert's gate, up and down were called before transformers 5, and the block that they are in."""
    if model.config.model_type == "mixtral":
        return ("w1", "w3", "w2"), "block_sparse_moe"
    return ("gate_proj", "up_proj", "down_proj"), "mlp"


def per_expert_folder(
    model: Any,
    folder: Path,
    names: tuple[str, str, str],
    block: str,
    r: int = 3,
    ranks: Mapping[int, int] | None = None,
) -> None:
    """As PEFT beside transformers 4 saved it: a LoRA per expert and module. names: of gate, up and down.

    ranks: the experts that have one, each with its rank; all experts at rank `r` if they are not given.
    """
    folder.mkdir()
    hidden, tensors = model.config.hidden_size, {}
    chosen = "|".join(map(str, ranks)) if ranks else r"\d+"
    for layer, module in enumerate(model.model.layers):
        if not hasattr(module.mlp, "experts"):
            continue
        experts = module.mlp.experts
        wide = model.config.intermediate_size if is_transposed(model) else experts.down_proj.shape[2]
        for expert, rank in (ranks or dict.fromkeys(range(experts.down_proj.shape[0]), r)).items():
            for name, d_in, d_out in zip(names, (hidden, hidden, wide), (wide, wide, hidden), strict=True):
                path = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(rank, d_in) * 0.2
                tensors[f"{path}.lora_B.weight"] = torch.randn(d_out, rank) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": r,
        "rank_pattern": {rf".*\.experts\.{expert}\..*": rank for expert, rank in (ranks or {}).items()},
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "bias": "none",
        # A dense layer and a shared expert have such modules, too.
        "target_modules": rf".*\.experts\.({chosen})\.({'|'.join(names)})",
        "peft_version": "0.17.0",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def with_experts_merged(model: Any, folder: Path, names: tuple[str, str, str], block: str) -> Any:
    """A copy of the model whose experts have what `per_expert_folder` wrote added to their weights."""
    merged, tensors = copy.deepcopy(model), load_file(folder / "adapter_model.safetensors")
    for layer, module in enumerate(merged.model.layers):
        for expert in range(module.mlp.experts.down_proj.shape[0] if hasattr(module.mlp, "experts") else 0):
            path = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}"
            if f"{path}.{names[0]}.lora_A.weight" not in tensors:
                continue
            pairs = [[tensors[f"{path}.{name}.lora_{half}.weight"] for half in "BA"] for name in names]
            gate, up, down = (4 / len(a) * b @ a for b, a in pairs)  # lora_alpha is 4
            with torch.no_grad():
                if is_transposed(model):
                    module.mlp.experts.gate_up_proj[expert] += torch.stack([gate, up], dim=1).flatten(0, 1).T
                    module.mlp.experts.down_proj[expert] += down.T
                    continue
                module.mlp.experts.gate_up_proj[expert] += torch.cat([gate, up])
                module.mlp.experts.down_proj[expert] += down
    return merged


def is_transposed(model: Any) -> bool:
    """Whether experts are [inputs, outputs], gate's and up's in turn."""
    return bool(model.config.model_type == "gpt_oss")


class Expected(NamedTuple):
    """Logits in float64, and how far float32 may be from them."""

    logits: NDArray[np.float64]
    allowed: float

    def allows(self, found: NDArray[np.floating]) -> bool:
        return float(np.abs(found - self.logits).max()) <= self.allowed


def expected(model: Any, tokens: torch.Tensor, folder: Path | None = None) -> Expected:
    """In float64, with PEFT's adapter of the folder if there is one.

    A random model may be so near to a singular one (a vector of almost no length that is normed) that float32 itself is
    further away than `TOLERANCE`, whoever computes: then as far is allowed as rounding takes it (`change_by_rounding`).
    400 random models and adapters needed 2.9 times what one rounding of the weights changes; ten times are allowed. An
    expert that rounding swaps changes as much once as ten times.
    """
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # the fused one has no float64
    if folder is not None:
        exact = PeftModel.from_pretrained(exact, folder).eval()
    logits = base_logits(exact, tokens)
    change = change_by_rounding(exact, lambda: base_logits(exact, tokens) - logits)
    return Expected(logits, max(TOLERANCE, 1.25 * change))


def change_by_rounding(exact: Any, difference: Callable[[], NDArray[np.float64]]) -> float:
    """The largest `difference()` after weights in float64 were changed by eight times a float32's rounding.

    Once is less than what a float32 program adds up: where two experts suit a token almost equally well, it would not
    show that such a program may choose the other one.
    """
    weights = [parameter.data for parameter in exact.parameters()]
    values, change = [weight.clone() for weight in weights], 0.0
    for _ in range(8):
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value * (1 + 2.0**-21 * torch.randn_like(value)))
        change = max(change, float(np.abs(difference()).max()))
    return change


def check_every_format(model: Any, backend: BackendWithLogits, folder: Path) -> None:
    """Each of `FORMATS` alone and all in one batch: PEFT's logits in float64, the same bits."""
    tokens = random_tokens(model)
    adapters, wanted = [], [expected(model, tokens)]
    for index, settings in enumerate(FORMATS.values()):
        save_random(model, folder / str(index), settings)
        adapters.append(read_adapter(folder / str(index), backend.spec))
        wanted.append(expected(model, tokens, folder / str(index)))
    together = served_logits(backend, [None, *adapters], tokens)
    for name, found, each in zip(["the base", *FORMATS], together, wanted, strict=True):
        assert each.allows(found), name
    for index, adapter in enumerate(adapters):
        difference = np.abs(wanted[index + 1].logits - wanted[0].logits).max()
        assert difference > 0.01, "an adapter that changes nothing shows nothing"
        (alone,) = served_logits(backend, [adapter], tokens)
        assert np.array_equal(alone, together[index + 1]), list(FORMATS)[index]


def check_one_lora_per_expert(model: Any, backend: BackendWithLogits, folder: Path) -> None:
    """As PEFT saved them before transformers 5: the logits of merged weights, and PEFT's where it has a rule."""
    names, block = names_of_old(model)
    folder, tokens = folder / "old", random_tokens(model)
    per_expert_folder(model, folder, names, block)
    (found,) = served_logits(backend, [read_adapter(folder, backend.spec)], tokens)
    merged = with_experts_merged(model, folder, names, block)
    assert expected(merged, tokens).allows(found)
    # PEFT 0.21 has no rule for these families, and leaves such experts out in silence.
    if model.config.model_type not in ("qwen2_moe", "deepseek_v2", "gpt_oss"):
        edit(folder, target_modules=list(names), rank_pattern={})
        assert expected(model, tokens, folder).allows(found)
