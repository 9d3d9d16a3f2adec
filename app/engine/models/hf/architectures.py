"""How families of checkpoints differ from Llama: a table by `config.json`'s `model_type`.

A family is an entry here, with functions only where a config key decides; the decoders do the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf import gemma, gpt_oss, mla, moe
from app.engine.models.hf.config_values import flag as _flag
from app.engine.models.hf.config_values import positive
from app.engine.models.hf.moe import FeedForward
from app.engine.models.spec import MlpSpec, ModelSpec


def _no_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """A window is accepted only if it spans the whole context, so that it has no effect."""
    positions = positive(config, "max_position_embeddings")
    if config.get("sliding_window") is not None and positive(config, "sliding_window") < positions:
        raise CheckpointError(
            f"config key 'sliding_window' is {config['sliding_window']}; models of this type have no window, so only "
            f"null or at least max_position_embeddings ({positions}) is accepted"
        )
    _check_layer_types(config, ["full_attention"] * num_layers)
    return [None] * num_layers


def _mistral_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    window = _window(config)
    _check_layer_types(config, ["full_attention" if window is None else "sliding_attention"] * num_layers)
    return [window] * num_layers


def _check_layer_types(config: Mapping[str, Any], kinds: list[str]) -> None:
    """`layer_types` of a family that does not use it must agree with what is computed."""
    if config.get("layer_types") not in (None, kinds):
        raise CheckpointError(
            f"config key 'layer_types' is {config['layer_types']!r}; every layer of this model has {kinds[0]!r}"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """null means none; an absent key means 4096, as in transformers."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return positive(config, "sliding_window", 4096)


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """`layer_types` decides if present, else layers from `max_window_layers` on slide."""
    window = _window(config) if _flag(config, "use_sliding_window") else None
    first, kinds = config.get("max_window_layers", 28), config.get("layer_types")
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(f"config key 'max_window_layers' is {first!r}; an integer is needed")
    if kinds is None:
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list):
        raise CheckpointError(f"config key 'layer_types' is {kinds!r}; a list with one name per layer is needed")
    if len(kinds) != num_layers:
        raise CheckpointError(f"layer_types has {len(kinds)} entries but the model has {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(f"layer type {kind!r} is not supported; use full_attention or sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise CheckpointError("layer_types asks for sliding_attention but use_sliding_window is false")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _qwen2_moe_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """`layer_types` decides if present, else every other layer below `max_window_layers` slides."""
    first = config.get("max_window_layers", 28)
    if config.get("layer_types") is not None or isinstance(first, bool) or not isinstance(first, int):
        return _qwen_windows(config, num_layers)  # refuses a non-integer
    window = _window(config) if _flag(config, "use_sliding_window") else None
    return [window if layer % 2 == 0 and layer < first else None for layer in range(num_layers)]


def _qwen3_moe_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """All layers slide, or none."""
    return [_window(config) if _flag(config, "use_sliding_window") else None] * num_layers


def _alternating_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """`layer_types` decides if present, else every other layer slides, starting with the first."""
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(num_layers)]
    sliding = {"sliding_window": 128, "use_sliding_window": True, "layer_types": config.get("layer_types") or kinds}
    return _qwen_windows({**config, **sliding, **_key_if_present(config, "sliding_window")}, num_layers)


def _key_if_present(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: config[key]} if key in config else {}


def _attention_bias(config: Mapping[str, Any]) -> bool:
    return _flag(config, "attention_bias")


def _never(_config: Mapping[str, Any]) -> bool:
    return False


def _no_mlp_bias(config: Mapping[str, Any]) -> bool:
    if _flag(config, "mlp_bias"):
        raise CheckpointError("config key 'mlp_bias' is true; experts of this family are served without biases only")
    return False


def _same_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


def _same_spec(spec: ModelSpec, _config: Mapping[str, Any]) -> ModelSpec:
    return spec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family departs from Llama. Each function reads the config; `keys` are the keys it reads.

    `off`: other families' keys, which transformers ignores here; accepted only as false. `llama_config` converts the
    config to Llama's keys, which everything else reads; `adjust_spec` adds to the spec what only this family has, from
    the original config.
    """

    keys: frozenset[str]
    qkv_bias: Callable[[Mapping[str, Any]], bool] = _never
    o_bias: Callable[[Mapping[str, Any]], bool] = _never
    mlp_bias: Callable[[Mapping[str, Any]], bool] = _never
    windows: Callable[[Mapping[str, Any], int], list[int | None]] = _no_windows
    feed_forwards: Callable[[Mapping[str, Any], MlpSpec, int], list[FeedForward]] = moe.dense
    qk_norm: bool = False
    whole_qk_norm: bool = False
    sinks: bool = False
    off: frozenset[str] = frozenset()
    default_head_dim: int | None = None
    default_kv_heads: int | None = None
    llama_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _same_config
    adjust_spec: Callable[[ModelSpec, Mapping[str, Any]], ModelSpec] = _same_spec


_QWEN_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN3_MOE_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "attention_bias"})
FAMILIES: Mapping[str, Architecture] = {
    "llama": Architecture(
        keys=frozenset({"attention_bias", "mlp_bias", "sliding_window", "layer_types"}),
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=lambda config: _flag(config, "mlp_bias"),
        off=frozenset({"use_sliding_window"}),
    ),
    "mistral": Architecture(
        keys=frozenset({"sliding_window", "layer_types"}),
        windows=_mistral_windows,
        off=frozenset({"attention_bias", "mlp_bias", "use_sliding_window"}),
        default_kv_heads=8,
    ),
    "qwen2": Architecture(
        keys=_QWEN_KEYS | {"attention_bias"},  # ignored: q, k and v always have biases, and o has none
        qkv_bias=lambda _config: True,
        windows=_qwen_windows,
        off=frozenset({"mlp_bias"}),
        default_kv_heads=32,
    ),
    "qwen3": Architecture(
        keys=_QWEN_KEYS | {"attention_bias"},
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        windows=_qwen_windows,
        off=frozenset({"mlp_bias"}),
        qk_norm=True,
        default_head_dim=128,
        default_kv_heads=32,
    ),
    **{
        name: Architecture(
            keys=gemma.KEYS,
            windows=lambda _config, num_layers: [None] * num_layers,
            off=frozenset({"attention_bias", "mlp_bias"}),
            default_head_dim=256,
            llama_config=gemma.llama_config,
            adjust_spec=gemma.adjust_spec,
        )
        for name in gemma.FAMILIES
    },
    "mixtral": Architecture(
        keys=frozenset({"sliding_window"}) | moe.MIXTRAL_KEYS,
        windows=lambda config, num_layers: _mistral_windows({"sliding_window": None, **config}, num_layers),
        feed_forwards=moe.mixtral,
        default_kv_heads=8,
    ),
    "qwen2_moe": Architecture(
        keys=_QWEN_KEYS | {"qkv_bias"} | moe.QWEN2_KEYS,
        qkv_bias=lambda config: _flag(config, "qkv_bias", default=True),
        windows=_qwen2_moe_windows,
        feed_forwards=moe.qwen2,
        default_kv_heads=16,
    ),
    "qwen3_moe": Architecture(
        keys=_QWEN3_MOE_KEYS | moe.QWEN3_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        windows=_qwen3_moe_windows,
        feed_forwards=moe.qwen3,
        qk_norm=True,
        default_kv_heads=4,
    ),
    "gpt_oss": Architecture(
        keys=frozenset({"attention_bias", "sliding_window", "layer_types"}) | moe.GPT_OSS_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        windows=_alternating_windows,
        feed_forwards=moe.gpt_oss,
        sinks=True,
        default_head_dim=64,
        default_kv_heads=8,
        llama_config=gpt_oss.llama_config,
    ),
    "deepseek_v2": Architecture(
        keys=frozenset({"attention_bias", "mlp_bias"}) | mla.KEYS | moe.DEEPSEEK_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=_no_mlp_bias,
        feed_forwards=moe.deepseek,
        llama_config=mla.llama_config,
        adjust_spec=mla.adjust_spec,
    ),
    "olmoe": Architecture(
        keys=frozenset({"attention_bias"}) | moe.OLMOE_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        feed_forwards=moe.olmoe,
        qk_norm=True,
        whole_qk_norm=True,
    ),
}
