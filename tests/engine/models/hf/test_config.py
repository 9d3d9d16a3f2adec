"""`config.json` to `ModelSpec`, beside transformers' own reading of the same configuration."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.engine.errors import CheckpointError
from app.engine.models.hf.config import spec_from_config
from app.engine.models.linear_modules import target_shape
from app.engine.models.rope import rope_spec
from app.engine.models.spec import ModelSpec
from tests.pairwise import pairwise

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def saved(config: PreTrainedConfig) -> dict[str, Any]:
    """What `save_pretrained` writes."""
    return dict(config.to_diff_dict())


def read(config: PreTrainedConfig) -> ModelSpec:
    return spec_from_config(saved(config), "tiny", "00")


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-all-keys": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.7,
    },
}


@pairwise({"name": ROPES, "head_dim": [12, 64, 128]}, strength=1)
def test_frequencies_equal_transformers(name: str, head_dim: int) -> None:
    config = LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=dict(ROPES[name]))
    rope = read(config).layers[0].attention.rope
    if name == "default":
        inv_freq, factor = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config, torch.device("cpu"))
    assert len(rope.inv_freq) == head_dim // 2
    torch.testing.assert_close(torch.tensor(rope.inv_freq), inv_freq, rtol=3e-7, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_older_rope_keys_mean_the_same(name: str) -> None:
    new = saved(LlamaConfig(**SIZES, rope_parameters=dict(ROPES[name])))
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = dict(ROPES[name])
    old["rope_theta"] = scaling.pop("rope_theta")
    old["rope_scaling"] = None if name == "default" else {**scaling, "type": scaling["rope_type"]}
    assert spec_from_config(old, "tiny", "00") == spec_from_config(new, "tiny", "00")
    assert AutoConfig.for_model(**old).rope_parameters["rope_theta"] == ROPES[name]["rope_theta"]


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "invented"])
def test_rope_that_depends_on_the_sequence_is_refused(kind: str) -> None:
    config = {**saved(LlamaConfig(**SIZES)), "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}
    with pytest.raises(CheckpointError, match=kind):
        spec_from_config(config, "tiny", "00")


def test_llama_reads_biases_and_head_dim() -> None:
    spec = read(
        LlamaConfig(
            **SIZES, attention_bias=True, mlp_bias=True, head_dim=20, rms_norm_eps=3e-6, tie_word_embeddings=True
        )
    )
    attention = spec.layers[0].attention
    assert (attention.qkv_bias, attention.o_bias, spec.layers[0].mlp.bias) == (True, True, True)
    assert (attention.head_dim, attention.num_heads, attention.num_kv_heads, attention.window) == (20, 4, 2, None)
    assert attention.scale == pytest.approx(20**-0.5)
    assert (spec.norm_eps, spec.tie_embeddings, spec.max_positions) == (3e-6, True, 512)
    assert target_shape(spec, 3, "q_proj") == (48, 80)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


def test_llama_without_kv_heads_has_one_per_query_head() -> None:
    config = {key: value for key, value in saved(LlamaConfig(**SIZES)).items() if key != "num_key_value_heads"}
    assert spec_from_config(config, "tiny", "00").layers[0].attention.num_kv_heads == 4


@pytest.mark.parametrize("window", [None, 7])
def test_mistral_slides_in_every_layer(window: int | None) -> None:
    spec = read(MistralConfig(**SIZES, sliding_window=window))
    assert [layer.attention.window for layer in spec.layers] == [window] * 4
    assert not spec.layers[0].attention.qkv_bias


def test_mistral_without_the_key_slides_as_transformers_does() -> None:
    config = {key: value for key, value in saved(MistralConfig(**SIZES)).items() if key != "sliding_window"}
    assert AutoConfig.for_model(**config).sliding_window == 4096
    assert spec_from_config(config, "tiny", "00").layers[0].attention.window == 4096


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize(("use", "first"), [(False, 2), (True, 2), (True, 0), (True, 9)])
def test_qwen_slides_from_max_window_layers(kind: type[Any], use: bool, first: int) -> None:
    config = kind(**SIZES, use_sliding_window=use, sliding_window=9, max_window_layers=first)
    wanted = [9 if layer_type == "sliding_attention" else None for layer_type in config.layer_types]
    assert [layer.attention.window for layer in read(config).layers] == wanted
    older = {key: value for key, value in saved(config).items() if key != "layer_types"}
    older |= {"use_sliding_window": use, "sliding_window": 9, "max_window_layers": first}
    assert [layer.attention.window for layer in spec_from_config(older, "t", "00").layers] == wanted


@pytest.mark.parametrize("sliding_window", [None, "absent"])
def test_a_qwen_window_that_is_null_or_absent_is_read_as_transformers_does(sliding_window: object) -> None:
    config = saved(Qwen2Config(**SIZES)) | {"use_sliding_window": True, "max_window_layers": 1}
    del config["layer_types"], config["sliding_window"]
    if sliding_window is None:
        config["sliding_window"] = None
    theirs = AutoConfig.for_model(**config)
    wanted = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.attention.window for layer in spec_from_config(config, "tiny", "00").layers] == wanted
    assert wanted[-1] == (None if sliding_window is None else 4096)


@pytest.mark.parametrize("kind", [MistralConfig, Qwen2Config])
def test_a_window_of_nothing_is_refused(kind: type[Any]) -> None:
    config = saved(kind(**SIZES)) | {"sliding_window": 0}
    if kind is Qwen2Config:
        config["use_sliding_window"] = True
    with pytest.raises(CheckpointError, match="sliding_window"):
        spec_from_config(config, "tiny", "00")


def test_qwen2_has_qkv_bias_and_qwen3_has_norms() -> None:
    qwen2 = read(Qwen2Config(**SIZES)).layers[0].attention
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 12)
    qwen3 = read(Qwen3Config(**SIZES)).layers[0].attention
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


def test_equal_layers_are_one_object() -> None:
    layers = read(Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=2)).layers
    assert layers[0] is layers[1]
    assert layers[2] is layers[3]
    assert layers[1] is not layers[2]


@pytest.mark.parametrize(
    ("in_config", "in_generation", "wanted"),
    [
        (2, None, (2,)),
        ([2, 5, 2], None, (2, 5)),
        (None, None, ()),
        (2, {}, (2,)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        (2, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_of_sequence_ids(in_config: object, in_generation: dict[str, Any] | None, wanted: tuple[int, ...]) -> None:
    config = {**saved(LlamaConfig(**SIZES)), "eos_token_id": in_config}
    assert spec_from_config(config, "tiny", "00", in_generation).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("attention_multiplier", 0.5),
        ("sliding_window", 128),  # not one of Llama's keys
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "x.Y"}),
        ("hidden_act", "relu"),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("is_llama_config", False),
        ("pruned_heads", {"0": [1]}),
        ("num_key_value_heads", 3),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("vocab_size", "96"),
        ("rms_norm_eps", -1.0),
        ("eos_token_id", "</s>"),
        ("attention_bias", 1),
        ("head_dim", 13),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(key: str, value: object) -> None:
    config = {**saved(LlamaConfig(**SIZES)), key: value}
    with pytest.raises(CheckpointError, match=key):
        spec_from_config(config, "tiny", "00")


#: Keys that transformers does not read for a family, at values that it loads.
WITHOUT_EFFECT: list[tuple[type[Any], dict[str, Any]]] = [
    (Qwen2Config, {"use_mrope": False}),
    (Qwen2Config, {"attention_bias": True}),
    (Qwen2Config, {"attention_bias": False}),
    (Qwen2Config, {"mlp_bias": False}),
    (LlamaConfig, {"max_sequence_length": 2048}),
    (LlamaConfig, {"activation": "swiglu", "hidden_act": "silu"}),
    (LlamaConfig, {"_flash_attn_2_enabled": True}),
    (LlamaConfig, {"attn_implementation": "sdpa"}),
    (LlamaConfig, {"use_flash_attn": True}),
    (LlamaConfig, {"is_causal": True}),
    (LlamaConfig, {"num_labels": 3}),
    (LlamaConfig, {"layer_types": ["full_attention"] * 4}),
    (LlamaConfig, {"sliding_window": 512}),
    (LlamaConfig, {"sliding_window": None, "use_sliding_window": False}),
    (MistralConfig, {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}),
    (MistralConfig, {"layer_types": ["sliding_attention"] * 4}),
    (MistralConfig, {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
]


@pytest.mark.parametrize(("kind", "keys"), WITHOUT_EFFECT, ids=str)
def test_keys_that_change_nothing_are_accepted(kind: type[Any], keys: dict[str, Any]) -> None:
    plain = saved(kind(**SIZES)) | {"sliding_window": keys.get("sliding_window", 7)}
    if kind is LlamaConfig:
        del plain["sliding_window"]
    assert spec_from_config(plain | keys, "t", "00") == spec_from_config(plain, "t", "00")
    AutoConfig.for_model(**plain | keys)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (Qwen2Config, "use_mrope", True),
        (LlamaConfig, "is_causal", False),
        (LlamaConfig, "sliding_window", 511),
        (LlamaConfig, "layer_types", ["sliding_attention"] * 4),
        (LlamaConfig, "use_sliding_window", True),
        (MistralConfig, "attention_bias", True),
        (MistralConfig, "layer_types", ["full_attention"] * 4),
        (Qwen3Config, "mlp_bias", True),
    ],
)
def test_the_same_keys_at_other_values_are_refused(kind: type[Any], key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        spec_from_config(saved(kind(**SIZES)) | {key: value}, "tiny", "00")


def test_an_activation_without_hidden_act_is_refused() -> None:
    config = {key: value for key, value in saved(LlamaConfig(**SIZES)).items() if key != "hidden_act"}
    with pytest.raises(CheckpointError, match="activation"):
        spec_from_config(config | {"activation": "swiglu"}, "tiny", "00")


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("heads", [8, 32])
def test_kv_heads_that_are_null_are_as_many_as_heads(kind: type[Any], heads: int) -> None:
    config = saved(kind(**SIZES)) | {"num_key_value_heads": None, "num_attention_heads": heads, "hidden_size": 64}
    wanted = AutoConfig.for_model(**config).num_key_value_heads
    assert spec_from_config(config, "tiny", "00").layers[0].attention.num_kv_heads == wanted == heads


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("default", "original_max_position_embeddings", 64), ("yarn", "finetuned", True)],
)
def test_rope_parameters_that_are_notes_change_nothing(name: str, key: str, value: object) -> None:
    assert rope_spec(ROPES[name] | {key: value}, 16, 256) == rope_spec(ROPES[name], 16, 256)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_size_is_named(key: str) -> None:
    config = {name: value for name, value in saved(LlamaConfig(**SIZES)).items() if name != key}
    with pytest.raises(CheckpointError, match=key):
        spec_from_config(config, "tiny", "00")


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["full_attention"] * 3 + ["chunked_attention"]])
def test_layer_types_that_do_not_fit_are_refused(kinds: list[str]) -> None:
    config = {**saved(Qwen3Config(**SIZES)), "layer_types": kinds}
    with pytest.raises(CheckpointError, match=r"layer.type"):
        spec_from_config(config, "tiny", "00")


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("value", [0, True, 1.5, "full_attention", {}])
def test_layer_types_that_are_no_list_are_refused(kind: type[Any], value: object) -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        spec_from_config({**saved(kind(**SIZES)), "layer_types": value}, "tiny", "00")


@pairwise(
    {
        "key": [
            "rope_type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "truncate",
        ],
        "value": ["x", [1], {"a": 1}, True, -1, nan, inf, 10**400],
    },
    strength=1,
)
def test_a_rope_parameter_of_another_kind_is_refused_by_name(key: str, value: object) -> None:
    if key == "truncate" and value is True:
        value = 1
    rope = {name: given for name, given in ROPES["yarn-all-keys"].items() if name not in ("mscale", key)}
    rope |= {key: value} if key == "attention_factor" else {"mscale": 0.7, key: value}
    with pytest.raises(CheckpointError, match=key):
        spec_from_config({**saved(LlamaConfig(**SIZES)), "rope_parameters": rope}, "tiny", "00")


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 1}, {"beta_fast": 1e308, "original_max_position_embeddings": 1e-308}]
)
def test_yarn_without_a_range_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(CheckpointError, match="no range of frequencies"):
        rope_spec(ROPES["yarn"] | changes, 16, 256)


def test_more_layers_than_memory_holds_are_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="claims 2147483647 layers"):
        spec_from_config({**saved(LlamaConfig(**SIZES)), "num_hidden_layers": (1 << 31) - 1}, "tiny", "00")


@pairwise(
    {"value": [10**30, 10**400, 1 << 31], "key": [*SIZES, "head_dim", "bos_token_id", "eos_token_id"]}, strength=1
)
def test_sizes_no_model_has_are_refused_before_anything_is_made_of_them(key: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=rf"{key}.* is {value}; .* 2147483647"):
        spec_from_config(saved(LlamaConfig(**SIZES)) | {key: value}, "tiny", "00")


@pytest.mark.parametrize("keys", [{"head_dim": 8193}, {"head_dim": None, "hidden_size": 40_000_000}])
def test_heads_no_model_has_are_refused(keys: dict[str, int | None]) -> None:
    with pytest.raises(CheckpointError, match=r"heads that are \d+ wide; at most 8192"):
        spec_from_config(saved(LlamaConfig(**SIZES)) | keys, "tiny", "00")
