"""What Gemma 2 and 3 (text) have beyond Llama, in `config.json` and tensor names.

That is soft caps, scaled embeddings, norms after each block and two rotary embeddings. Their norms multiply by 1 + w;
the sum is taken here, once, in float32, so that no device needs to know. Sources: Gemma Team 2024 (Gemma 2), 2025
(Gemma 3); transformers' implementations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.rope import rope_spec
from app.engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec

T = TypeVar("T")

FAMILIES = ("gemma2", "gemma3_text")
_READ = """
    hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window layer_types
    sliding_window_pattern _sliding_window_pattern rope_local_base_freq use_bidirectional_attention cache_implementation
"""
#: These families' keys besides Llama's.
KEYS = frozenset(_READ.split())
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "pattern": 2,
        "rope_theta": 10_000.0,
        "num_key_value_heads": 4,
    },
    "gemma3_text": {
        "sliding_window": 4096,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pattern": 6,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 4,
    },
}
_RENAMED = {
    "post_attention_layernorm.weight": "self_attn.output_norm.weight",
    "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight": "mlp.output_norm.weight",
}


def llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with transformers' defaults for Gemma and with Llama's key names."""
    defaults = _DEFAULTS[str(config["model_type"])]
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("config key 'use_bidirectional_attention' is true; only causal attention is served")
    found = dict(config)
    found["hidden_act"] = config.get("hidden_activation") or "gelu_pytorch_tanh"
    found["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    found["num_key_value_heads"] = config.get("num_key_value_heads", defaults["num_key_value_heads"])
    found.setdefault("max_position_embeddings", 8192 if config["model_type"] == "gemma2" else 131_072)
    found.setdefault("rope_theta", defaults["rope_theta"])
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and _FULL in parameters:
        found["rope_parameters"] = parameters[_FULL]
    return found


def adjust_spec(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Add what only Gemma has to a spec that was read from `llama_config`."""
    kind = spec.family
    first = spec.layers[0]
    window = config.get("sliding_window", _DEFAULTS[kind]["sliding_window"])
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"config key 'sliding_window' is {window!r}; a positive integer is needed")
    attention = replace(
        first.attention,
        scale=_number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        qk_norm=kind == "gemma3_text",
        softcap=_cap(config, kind, "attn_logit_softcapping"),
    )
    if kind == "gemma3_text" and attention.softcap is not None:
        raise CheckpointError("config key 'attn_logit_softcapping' is set; transformers computes Gemma 3 without it")
    sliding = replace(attention, window=window, rope=_local_rope(config, attention))
    layers = {
        _FULL: LayerSpec(attention, first.mlp, post_norms=True),
        _SLIDING: LayerSpec(sliding, first.mlp, post_norms=True),
    }
    return replace(
        spec,
        layers=tuple(layers[name] for name in _layer_types(config, kind, len(spec.layers))),
        embedding_scale=float(np.float32(spec.hidden_size**0.5)),
        logit_softcap=_cap(config, kind, "final_logit_softcapping"),
    )


def canonical_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """The mapping with its keys as canonical names."""
    return {canonical_name(name): value for name, value in tensors.items()}


def canonical_name(name: str) -> str:
    """The canonical name of a tensor of these families."""
    parts = name.split(".", 3)
    if len(parts) == 4 and parts[3] in _RENAMED:
        return ".".join([*parts[:3], _RENAMED[parts[3]]])
    return name


def canonical_tensors(tensors: Iterator[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Tensors under canonical names; norms as the factor they multiply by, in float32."""
    for name, values in tensors:
        is_norm = name.endswith("norm.weight")
        yield canonical_name(name), np.float32(1) + values.astype(np.float32) if is_norm else values


def stored_tensors(tensors: Iterator[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The opposite of `canonical_tensors`."""
    names = {canonical: name for name, canonical in _RENAMED.items()}
    for name, values in tensors:
        parts = name.split(".", 3)
        if len(parts) == 4:
            parts[3] = names.get(parts[3], parts[3])
        yield ".".join(parts), values - np.float32(1) if name.endswith("norm.weight") else values


def _local_rope(config: Mapping[str, Any], attention: AttentionSpec) -> RopeSpec:
    """The rotary embedding of sliding layers: Gemma 3 has a second, unscaled one for them."""
    if config["model_type"] == "gemma2":
        return attention.rope
    parameters = config.get("rope_parameters")
    given = parameters.get(_SLIDING) if isinstance(parameters, Mapping) else None
    local = dict(given or {"rope_theta": config.get("rope_local_base_freq", 10_000.0)})
    return rope_spec({"rope_theta": 10_000.0, **local}, attention.head_dim, 1)


def _layer_types(config: Mapping[str, Any], kind: str, num_layers: int) -> list[str]:
    """`layer_types` if present, else every n-th layer has full attention."""
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        pattern = _DEFAULTS[kind]["pattern"] if pattern is None else pattern
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise CheckpointError(f"config key 'sliding_window_pattern' is {pattern!r}; a positive integer is needed")
        return [_FULL if (index + 1) % pattern == 0 else _SLIDING for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {_FULL, _SLIDING}:
        raise CheckpointError(
            f"config key 'layer_types' is {kinds!r}; a list of {num_layers} times {_FULL} or {_SLIDING} is needed"
        )
    return kinds


def _cap(config: Mapping[str, Any], kind: str, key: str) -> float | None:
    if config.get(key, _DEFAULTS[kind][key]) is None:
        return None
    return _number(config, key, _DEFAULTS[kind][key])


def _number(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"config key {key!r} is {value!r}; a positive number is needed")
    return float(value)
