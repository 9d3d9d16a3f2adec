"""DeepSeek-V2 and gpt-oss in GGUF: metadata in the format of `config.json`, and tensors as a Hugging Face folder has
them.

Metadata that GGUF lacks takes the published models' values (gpt-oss: which layers slide, the clamp, yarn without
truncation); a missing required key is a `CheckpointError`. Where a file stores the two halves of `kv_b_proj`, they are
joined. Source: llama.cpp's converter and loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.spec import MAX_SIZE

#: Architecture -> transformers' model_type.
ARCHITECTURES = {"deepseek2": "deepseek_v2", "gpt-oss": "gpt_oss"}
_KEYS = """
    leading_dense_block_count expert_shared_count expert_group_count expert_group_used_count expert_weights_scale
    attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla
    rope.scaling.yarn_log_multiplier rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
"""
#: Each architecture's keys besides Llama's.
KEYS = {
    "deepseek2": frozenset(_KEYS.split()),
    "gpt-oss": frozenset({"attention.sliding_window", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}),
}
#: Keys that must have one of these values, besides Llama's. 3: a softmax over the chosen experts only.
FIXED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "deepseek2": {"expert_weights_norm": (False,), "rope.scaling.yarn_ext_factor": (1.0,)},
    "gpt-oss": {"expert_gating_func": (3,), "rope.scaling.yarn_ext_factor": (1.0,)},
}
#: Tensors of a layer that have other names than Llama's, or mean another module.
LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "gpt-oss": {
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
    },
}
_HALVES = (".self_attn.k_b_proj.weight", ".self_attn.v_b_proj.weight")


def hf_config_from_gguf(architecture: str, keys: Mapping[str, Any], has_bias: Callable[[str], bool]) -> dict[str, Any]:
    """The metadata as a `config.json`, without the vocabulary. has_bias: whether a layer's tensor, by GGUF name, has
    one.

    CheckpointError names a key that is missing, of the wrong type, or contradicts another.
    """
    found = _Keys(architecture, keys)
    config = {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": found.integer("embedding_length"),
        "num_hidden_layers": found.integer("block_count"),
        "num_attention_heads": found.integer("attention.head_count"),
        "max_position_embeddings": found.integer("context_length"),
        "rms_norm_eps": found.number("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": found.integer("expert_used_count"),
        "attention_bias": has_bias("attn_output"),
    }
    return config | (_deepseek(found) if architecture == "deepseek2" else _gpt_oss(found))


class _Keys:
    """Checked values of the architecture's namespace."""

    def __init__(self, architecture: str, keys: Mapping[str, Any]) -> None:
        self._architecture, self._keys = architecture, keys

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            raise CheckpointError(self._wrong(key, value, f"an integer up to {MAX_SIZE}"))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(self._wrong(key, value, "a number"))
        return float(value)

    def name(self, key: str, default: str) -> str:
        return str(self._keys.get(key, default))

    def _wrong(self, key: str, value: object, needed: str) -> str:
        found = "missing" if value is None else repr(value)
        return f"GGUF key '{self._architecture}.{key}' is {found}; {needed} is needed"


def _deepseek(keys: _Keys) -> dict[str, Any]:
    rank, rope_size = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    key_length, value_length = keys.integer("attention.key_length"), keys.integer("attention.value_length")
    if "attention.key_length_mla" in keys:  # else the file predates llama.cpp's latent cache: lengths are heads'
        if (key_length, value_length) != (rank + rope_size, rank):
            raise CheckpointError(
                f"attention.key_length is {key_length} and value_length {value_length}; latents of {rank} with "
                f"{rope_size} rotated numbers make {rank + rope_size} and {rank}"
            )
        key_length, value_length = (keys.integer(f"attention.{kind}_length_mla") for kind in ("key", "value"))
    config: dict[str, Any] = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count"),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.integer("attention.q_lora_rank") if "attention.q_lora_rank" in keys else None,
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": key_length - rope_size,
        "v_head_dim": value_length,
        "rope_parameters": _rope(keys),
    }
    groups = keys.integer("expert_group_count", 1)
    if groups > 1:  # published models with such a router choose groups by their best expert
        config |= {
            "topk_method": "group_limited_greedy",
            "n_group": groups,
            "topk_group": keys.integer("expert_group_used_count"),
        }
    if config["rope_parameters"]["rope_type"] == "yarn":
        # A tenth of mscale_all_dim, in float32; the converter omits mscale, which equals it in published models.
        mscale = round(keys.number("rope.scaling.yarn_log_multiplier") * 10, 6)
        config["rope_parameters"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    return config


def _gpt_oss(keys: _Keys) -> dict[str, Any]:
    rope = _rope(keys)
    return {
        "num_key_value_heads": keys.integer("attention.head_count_kv"),
        "head_dim": keys.integer("attention.key_length"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    kind = keys.name("rope.scaling.type", "none")
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
    }
    if kind in ("linear", "yarn"):
        parameters["factor"] = keys.number("rope.scaling.factor")
    if kind == "yarn":
        parameters |= {
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    return parameters


def whole_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, with the halves of `kv_b_proj` joined; a half alone keeps its name and is refused later."""
    found = dict(shapes)
    for name in shapes:
        if not name.endswith(_HALVES[0]):
            continue
        other = name.removesuffix(_HALVES[0]) + _HALVES[1]
        keys, values = shapes[name], shapes.get(other, ())
        if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
            raise CheckpointError(
                f"{name!r} is {list(keys)} and {other!r} {list(values)}; [heads, latent, key] and "
                "[heads, value, latent] are needed"
            )
        del found[name], found[other]
        found[_whole(name)] = (keys[0] * (keys[2] + values[1]), keys[1])
    return found


def whole_tensors(tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of `whole_shapes`; a half waits for the other one."""
    waiting: dict[str, NDArray[np.float32]] = {}
    for name, values in tensors:
        if not name.endswith(_HALVES):
            yield name, values
            continue
        whole = _whole(name)
        other = waiting.pop(whole, None)
        if other is None:
            waiting[whole] = values
            continue
        by_latent, of_values = (values, other) if name.endswith(_HALVES[0]) else (other, values)
        both = np.concatenate([by_latent.swapaxes(1, 2), of_values], axis=1)  # [heads, key + value, latent]
        yield whole, both.reshape(-1, both.shape[2])


def _whole(half: str) -> str:
    return half[: half.rindex(".self_attn.")] + ".self_attn.kv_b_proj.weight"
