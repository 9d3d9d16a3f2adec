"""`config.json` of a Hugging Face folder, read into a `ModelSpec`.

In: the parsed JSON of a Llama, Mistral, Qwen2 or Qwen3 model, or of a mixture of experts (`hf_experts`), saved by any
transformers version. Out: a `ModelSpec`. Every key is read, on the list of inert ones, or refused by name; a value that
would change the arithmetic and is not represented is a `CheckpointError`. Files are another module's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.engine.errors import CheckpointError
from app.engine.models import hf_experts, hf_gemma, hf_gpt_oss, hf_latent
from app.engine.models.config_values import flag as _flag
from app.engine.models.config_values import positive
from app.engine.models.hf_experts import FeedForward
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
# These change nothing about a forward pass at inference.
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
# These must have one of the values given.
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


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family departs from Llama. Each function reads the config; `keys` are those it reads.

    `off` are keys of other families: transformers reads nothing of them here, and they are accepted as false alone.
    """

    keys: frozenset[str]
    qkv_bias: Callable[[Mapping[str, Any]], bool]
    o_bias: Callable[[Mapping[str, Any]], bool]
    mlp_bias: Callable[[Mapping[str, Any]], bool]
    windows: Callable[[Mapping[str, Any], int], list[int | None]]
    feed_forwards: Callable[[Mapping[str, Any], MlpSpec, int], list[FeedForward]] = hf_experts.dense
    qk_norm: bool = False
    whole_qk_norm: bool = False
    sinks: bool = False
    off: frozenset[str] = frozenset()
    default_head_dim: int | None = None
    default_kv_heads: int | None = None


def spec_from_config(
    config: Mapping[str, Any],
    name: str,
    digest: str,
    generation_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Read `config.json` (and the end-of-sequence ids of `generation_config.json`)."""
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; supported families are {', '.join(_FAMILIES)}"
        )
    given = config
    if model_type in hf_gemma.FAMILIES:
        config = hf_gemma.plain(config)
    elif model_type in hf_latent.FAMILIES:
        config = hf_latent.plain(config)
    elif model_type == hf_gpt_oss.FAMILY:
        config = hf_gpt_oss.plain(config)
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
    rope = rope_spec(_rope_parameters(config), head_dim, max_positions)
    mlp = MlpSpec(positive(config, "intermediate_size"), _activation(config), family.mlp_bias(config))
    windows, feed_forwards = family.windows(config, num_layers), family.feed_forwards(config, mlp, num_layers)
    shared: dict[tuple[int | None, FeedForward], LayerSpec] = {}
    for window, feed_forward in zip(windows, feed_forwards, strict=True):
        if (window, feed_forward) not in shared:
            attention = AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                rope=rope,
                qkv_bias=family.qkv_bias(config),
                o_bias=family.o_bias(config),
                qk_norm=family.qk_norm,
                whole_qk_norm=family.whole_qk_norm,
                window=window,
                sinks=family.sinks,
            )
            shared[window, feed_forward] = LayerSpec(attention, *feed_forward)
    spec = ModelSpec(
        name=name,
        family=str(model_type),
        digest=digest,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        max_positions=max_positions,
        norm_eps=_norm_eps(config),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        layers=tuple(shared[kind] for kind in zip(windows, feed_forwards, strict=True)),
        bos_token_id=_token_id(config.get("bos_token_id"), "bos_token_id"),
        eos_token_ids=_eos_token_ids(config, generation_config),
    )
    if model_type in hf_latent.FAMILIES:
        return hf_latent.adjusted(spec, config)
    return hf_gemma.adjusted(spec, given) if model_type in hf_gemma.FAMILIES else spec


def _check_keys(config: Mapping[str, Any], family: _Family, model_type: str) -> None:
    known = family.keys.union(_READ.split(), INERT_KEYS.split())
    for key, value in config.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                raise CheckpointError(f"config key {key!r} is {value!r}; only {_FIXED[key][0]!r} is supported")
        elif key in family.off:
            if value not in (None, False):
                raise CheckpointError(f"config key {key!r} is {value!r}; for model_type {model_type!r} only false is")
        elif key == "activation" and config.get("hidden_act") is not None:
            continue  # older names of what hidden_act says
        elif value is not None and key not in known:
            raise CheckpointError(f"config key {key!r} ({value!r}) is not understood for model_type {model_type!r}")


def _num_kv_heads(config: Mapping[str, Any], family: _Family, num_heads: int) -> int:
    """null is one per query head; an absent key is the family's own number, as in transformers."""
    is_null = "num_key_value_heads" in config and config["num_key_value_heads"] is None
    return positive(config, "num_key_value_heads", num_heads if is_null else family.default_kv_heads or num_heads)


def _head_dim(config: Mapping[str, Any], family: _Family, hidden_size: int, num_heads: int) -> int:
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


def _norm_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise CheckpointError(f"rms_norm_eps is {value!r}; a number from 0 to 1 is needed")
    return float(value)


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """What generation stops at: generation_config.json says so where it exists, else config.json."""
    value = (generation_config or {}).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    found = [_token_id(item, "eos_token_id") for item in ids]
    return tuple(dict.fromkeys(item for item in found if item is not None))


def _token_id(value: object, key: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise CheckpointError(f"{key} is {value!r}; a token id up to {MAX_SIZE} or null is needed")
    return value


def _no_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """A window is accepted where it reaches over the whole context, and so changes nothing."""
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
    """`layer_types`, where it is given to a family that does not read it, says what is computed anyway."""
    if config.get("layer_types") not in (None, kinds):
        raise CheckpointError(
            f"config key 'layer_types' is {config['layer_types']!r}; every layer of this model has {kinds[0]!r}"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """null is none; an absent key is 4096, as in transformers."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return positive(config, "sliding_window", 4096)


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """`layer_types` decides where it exists, else layers from `max_window_layers` on slide."""
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
    """`layer_types` decides where it exists, else every other layer below `max_window_layers` slides."""
    first = config.get("max_window_layers", 28)
    if config.get("layer_types") is not None or isinstance(first, bool) or not isinstance(first, int):
        return _qwen_windows(config, num_layers)  # which refuses what is no integer
    window = _window(config) if _flag(config, "use_sliding_window") else None
    return [window if layer % 2 == 0 and layer < first else None for layer in range(num_layers)]


def _qwen3_moe_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """All layers slide, or none."""
    return [_window(config) if _flag(config, "use_sliding_window") else None] * num_layers


def _alternating_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """`layer_types` decides where it exists, else every other layer slides, the first one with them."""
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(num_layers)]
    sliding = {"sliding_window": 128, "use_sliding_window": True, "layer_types": config.get("layer_types") or kinds}
    return _qwen_windows({**config, **sliding, **_given(config, "sliding_window")}, num_layers)


def _given(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: config[key]} if key in config else {}


def _attention_bias(config: Mapping[str, Any]) -> bool:
    return _flag(config, "attention_bias")


def _never(_config: Mapping[str, Any]) -> bool:
    return False


def _no_mlp_bias(config: Mapping[str, Any]) -> bool:
    if _flag(config, "mlp_bias"):
        raise CheckpointError("config key 'mlp_bias' is true; experts of this family are served without biases only")
    return False


_QWEN_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN3_MOE_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "attention_bias"})
_FAMILIES = {
    "llama": _Family(
        keys=frozenset({"attention_bias", "mlp_bias", "sliding_window", "layer_types"}),
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=lambda config: _flag(config, "mlp_bias"),
        windows=_no_windows,
        off=frozenset({"use_sliding_window"}),
    ),
    "mistral": _Family(
        keys=frozenset({"sliding_window", "layer_types"}),
        qkv_bias=_never,
        o_bias=_never,
        mlp_bias=_never,
        windows=_mistral_windows,
        off=frozenset({"attention_bias", "mlp_bias", "use_sliding_window"}),
        default_kv_heads=8,
    ),
    "qwen2": _Family(
        keys=_QWEN_KEYS | {"attention_bias"},  # read by nobody: q, k and v have biases, and o has none
        qkv_bias=lambda _config: True,
        o_bias=_never,
        mlp_bias=_never,
        windows=_qwen_windows,
        off=frozenset({"mlp_bias"}),
        default_kv_heads=32,
    ),
    "qwen3": _Family(
        keys=_QWEN_KEYS | {"attention_bias"},
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=_never,
        windows=_qwen_windows,
        off=frozenset({"mlp_bias"}),
        qk_norm=True,
        default_head_dim=128,
        default_kv_heads=32,
    ),
    **{
        name: _Family(
            keys=hf_gemma.KEYS,
            qkv_bias=_never,
            o_bias=_never,
            mlp_bias=_never,
            windows=lambda _config, num_layers: [None] * num_layers,
            off=frozenset({"attention_bias", "mlp_bias"}),
            default_head_dim=256,
        )
        for name in hf_gemma.FAMILIES
    },
    "mixtral": _Family(
        keys=frozenset({"sliding_window"}) | hf_experts.MIXTRAL_KEYS,
        qkv_bias=_never,
        o_bias=_never,
        mlp_bias=_never,
        windows=lambda config, num_layers: _mistral_windows({"sliding_window": None, **config}, num_layers),
        feed_forwards=hf_experts.mixtral,
        default_kv_heads=8,
    ),
    "qwen2_moe": _Family(
        keys=_QWEN_KEYS | {"qkv_bias"} | hf_experts.QWEN2_KEYS,
        qkv_bias=lambda config: _flag(config, "qkv_bias", default=True),
        o_bias=_never,
        mlp_bias=_never,
        windows=_qwen2_moe_windows,
        feed_forwards=hf_experts.qwen2,
        default_kv_heads=16,
    ),
    "qwen3_moe": _Family(
        keys=_QWEN3_MOE_KEYS | hf_experts.QWEN3_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=_never,
        windows=_qwen3_moe_windows,
        feed_forwards=hf_experts.qwen3,
        qk_norm=True,
        default_kv_heads=4,
    ),
    "gpt_oss": _Family(
        keys=frozenset({"attention_bias", "sliding_window", "layer_types"}) | hf_experts.GPT_OSS_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=_never,
        windows=_alternating_windows,
        feed_forwards=hf_experts.gpt_oss,
        sinks=True,
        default_head_dim=64,
        default_kv_heads=8,
    ),
    "deepseek_v2": _Family(
        keys=frozenset({"attention_bias", "mlp_bias"}) | hf_latent.KEYS | hf_experts.DEEPSEEK_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=_no_mlp_bias,
        windows=_no_windows,
        feed_forwards=hf_experts.deepseek,
    ),
    "olmoe": _Family(
        keys=frozenset({"attention_bias"}) | hf_experts.OLMOE_KEYS,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        mlp_bias=_never,
        windows=_no_windows,
        feed_forwards=hf_experts.olmoe,
        qk_norm=True,
        whole_qk_norm=True,
    ),
}
