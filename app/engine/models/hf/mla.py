"""Multi-head latent attention from a DeepSeek-V2 `config.json`.

A value that would change the arithmetic and has no field in the spec is a `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf.config_values import positive
from app.engine.models.rope import yarn_mscale
from app.engine.models.spec import LatentSpec, ModelSpec, checked_head_dim

KEYS = frozenset({"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"})
#: The latents' norms use this whatever rms_norm_eps says, as in transformers.
_NORM_EPS = 1e-6
#: Width of the CPU kernels' tiles; each head must begin at a tile.
_TILE = 16


def llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the rotated part of a head as its head, checked for consistency."""
    heads = positive(config, "num_attention_heads")
    if positive(config, "num_key_value_heads", heads) != heads:
        raise CheckpointError(
            f"num_key_value_heads is {config['num_key_value_heads']}, but latents make keys for all {heads} heads"
        )
    rope_size = positive(config, "qk_rope_head_dim", 64)
    whole = positive(config, "qk_nope_head_dim", 128) + rope_size
    if config.get("qk_head_dim") not in (None, whole):
        raise CheckpointError(f"qk_head_dim is {config['qk_head_dim']!r}, but the parts of a head are {whole} together")
    if config.get("head_dim") not in (None, rope_size):
        raise CheckpointError(f"head_dim is {config['head_dim']!r}, but what rotates of a head is {rope_size} wide")
    return {**config, "head_dim": rope_size, "num_key_value_heads": heads}


def adjust_spec(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """`spec` with latent attention in every layer."""
    query_rank = None if "q_lora_rank" in config and config["q_lora_rank"] is None else 1536
    latent = LatentSpec(
        kv_rank=_in_tiles(config, "kv_lora_rank", 512),
        key_size=_in_tiles(config, "qk_nope_head_dim", 128),
        rope_size=positive(config, "qk_rope_head_dim", 64),
        value_size=_in_tiles(config, "v_head_dim", 128),
        query_rank=None if query_rank is None else positive(config, "q_lora_rank", query_rank),
        norm_eps=_NORM_EPS,
    )
    head_dim = checked_head_dim(latent.key_size + latent.rope_size)
    checked_head_dim(latent.kv_rank)
    scale = head_dim**-0.5 * _yarn_scale(config)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, head_dim=head_dim, scale=scale, latent=latent))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def _in_tiles(config: Mapping[str, Any], key: str, default: int) -> int:
    size = positive(config, key, default)
    if size % _TILE:
        raise CheckpointError(f"config key {key!r} is {size}; only multiples of {_TILE} are served")
    return size


def _yarn_scale(config: Mapping[str, Any]) -> float:
    """Factor of the scores besides 1 / sqrt(head_dim): yarn's mscale_all_dim, squared (DeepSeek-AI 2024).

    `rope_spec` has checked both numbers.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    if parameters.get("factor") is None:
        raise CheckpointError("rope parameter 'mscale_all_dim' is given without 'factor'")
    return yarn_mscale(float(parameters["factor"]), float(parameters["mscale_all_dim"])) ** 2
