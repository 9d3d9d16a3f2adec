"""Reads a decoder's Hugging Face `config.json`, of any transformers version, into a `ModelSpec`.

Every key is read, on the list of inert ones, or refused by name; a value that would change the arithmetic and has no
field in the spec is a `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from app.engine.errors import CheckpointError
from app.engine.models.hf.architectures import FAMILIES, Architecture
from app.engine.models.hf.config_values import flag as _flag
from app.engine.models.hf.config_values import norm_eps, positive
from app.engine.models.hf.moe import FeedForward
from app.engine.models.rope import rope_spec
from app.engine.models.spec import (
    MAX_SIZE,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    checked_head_dim,
    checked_num_layers,
)

_READ = """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor bos_token_id eos_token_id
"""
# Keys that do not affect a forward pass at inference.
INERT_KEYS = """
    architectures torch_dtype dtype transformers_version use_cache initializer_range attention_dropout
    pretraining_tp _name_or_path name_or_path pad_token_id sep_token_id tokenizer_class return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward id2label
    label2id finetuning_task task_specific_params problem_type prefix max_length min_length do_sample temperature
    top_k top_p typical_p num_beams num_beam_groups num_return_sequences repetition_penalty length_penalty
    early_stopping diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens return_dict_in_generate output_scores decoder_start_token_id transformers.js_config
    unsloth_version unsloth_fixed _attn_implementation_autoset _attn_implementation tie_encoder_decoder num_labels
    attn_implementation _flash_attn_2_enabled use_flash_attn max_sequence_length
"""
# Keys that must have one of these values.
_FIXED: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_causal": (True,),
}


def spec_from_config(
    config: Mapping[str, Any],
    name: str,
    digest: str,
    generation_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Read `config.json`, and the end-of-sequence ids of `generation_config.json`."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(unknown_family(config))
    given, config = config, family.llama_config(config)
    _check_keys(config, family, str(model_type))
    hidden_size = positive(config, "hidden_size")
    num_layers = checked_num_layers(positive(config, "num_hidden_layers"))
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = _num_kv_heads(config, family, num_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    max_positions = positive(config, "max_position_embeddings")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope_spec(_rope_parameters(config), head_dim, max_positions),
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        qk_norm=family.qk_norm,
        whole_qk_norm=family.whole_qk_norm,
        sinks=family.sinks,
    )
    mlp = MlpSpec(positive(config, "intermediate_size"), _activation(config), family.mlp_bias(config))
    spec = ModelSpec(
        name=name,
        family=str(model_type),
        digest=digest,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        max_positions=max_positions,
        norm_eps=norm_eps(config, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        layers=_layers(attention, family.windows(config, num_layers), family.feed_forwards(config, mlp, num_layers)),
        bos_token_id=token_id(config.get("bos_token_id"), "bos_token_id"),
        eos_token_ids=eos_token_ids(config, generation_config),
    )
    return family.adjust_spec(spec, given)


def unknown_family(config: Mapping[str, Any]) -> str:
    """What is said of a config whose family is none of `FAMILIES`."""
    return f"model_type {config.get('model_type')!r} is not among the supported families ({', '.join(FAMILIES)})"


def _layers(
    attention: AttentionSpec, windows: list[int | None], feed_forwards: list[FeedForward]
) -> tuple[LayerSpec, ...]:
    """One LayerSpec per layer; equal layers share one object."""
    shared: dict[tuple[int | None, FeedForward], LayerSpec] = {}
    for window, feed_forward in zip(windows, feed_forwards, strict=True):
        if (window, feed_forward) not in shared:
            shared[window, feed_forward] = LayerSpec(replace(attention, window=window), *feed_forward)
    return tuple(shared[kind] for kind in zip(windows, feed_forwards, strict=True))


def _check_keys(config: Mapping[str, Any], family: Architecture, model_type: str) -> None:
    known = family.keys.union(_READ.split(), INERT_KEYS.split())
    for key, value in config.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                raise CheckpointError(f"config key {key!r} is {value!r}; only {_FIXED[key][0]!r} is supported")
        elif key in family.off:
            if value not in (None, False):
                raise CheckpointError(f"config key {key!r} is {value!r}; for model_type {model_type!r} only false is")
        elif key == "activation" and config.get("hidden_act") is not None:
            continue  # an older name of hidden_act
        elif value is not None and key not in known:
            raise CheckpointError(f"config key {key!r} ({value!r}) is not understood for model_type {model_type!r}")


def _num_kv_heads(config: Mapping[str, Any], family: Architecture, num_heads: int) -> int:
    """null means one per query head; if absent, the family's default, as in transformers."""
    is_null = "num_key_value_heads" in config and config["num_key_value_heads"] is None
    return positive(config, "num_key_value_heads", num_heads if is_null else family.default_kv_heads or num_heads)


def _head_dim(config: Mapping[str, Any], family: Architecture, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and family.default_head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and head_dim is not given"
        )
    return checked_head_dim(positive(config, "head_dim", family.default_head_dim or hidden_size // num_heads))


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping from transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    merged = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(merged, Mapping):
        raise CheckpointError(f"rope parameters must be an object, not {merged!r}")
    parameters = dict(merged)
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            parameters.setdefault(key, config[key])
    return parameters


def _activation(config: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
    name = config.get("hidden_act", "silu")
    if name in ("silu", "swish"):
        return "silu"
    if name == "gelu_pytorch_tanh":
        return "gelu_tanh"
    raise CheckpointError(f"hidden_act {name!r} is not supported; use 'silu' or 'gelu_pytorch_tanh'")


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids that end generation: generation_config.json's if present, else config.json's."""
    value = (generation_config or {}).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    found = [token_id(item, "eos_token_id") for item in ids]
    return tuple(dict.fromkeys(item for item in found if item is not None))


def token_id(value: object, key: str) -> int | None:
    """The id that a config key names, or None for null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise CheckpointError(f"{key} is {value!r}; a token id up to {MAX_SIZE} or null is needed")
    return value
