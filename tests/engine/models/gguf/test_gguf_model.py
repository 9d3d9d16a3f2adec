"""GGUF files: the demo model beside transformers' reading of it, and tiny ones of each architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from app.engine.errors import CheckpointError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.gguf.gguf_file import GgufFile, read_gguf
from app.engine.models.gguf.gguf_model import spec_from_gguf
from app.engine.models.hf.config import spec_from_config
from tests.pairwise import pairwise
from tests.seeds import any_seed, rng

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2.0**-17,  # GGUF keeps it in float32
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-llama3-rope": LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3)),
    "qwen2": Qwen2Config(**{key: value for key, value in SIZES.items() if key != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
#: Half a step of 127 to the largest number of a block, and the float16 of that step, of the largest number.
Q8_0_ERROR = 1 / 254 + 2**-11
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, tuple[str, PreTrainedConfig]] = {
    "mixtral": ("llama", MixtralConfig(**SIZES, num_local_experts=6)),
    "qwen2_moe": ("qwen2moe", Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=64)),
    "qwen3_moe": ("qwen3moe", Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True)),
    "olmoe": ("olmoe", OlmoeConfig(**(SIZES | {"head_dim": 16}), num_experts=6, num_experts_per_tok=2)),
}
HF_TO_GGUF = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
    for prefix, new in top.items():
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{HF_TO_GGUF[module]}.{suffix}"


def interleaved(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's `permute` (convert_hf_to_gguf.py)."""
    split = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(any_seed())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """As the converter finds them: gate's and up's experts apart, a shared expert's gate as a vector."""
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith("experts.gate_up_proj"):
            for module, part in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", f"{module}.weight"), part
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values
        else:
            yield name, values[0] if name.endswith("shared_expert_gate.weight") else values


def write_gguf(
    path: Path, model: PreTrainedModel, kind: Kind = Kind.F32, architecture: str | None = None, **keys: Any
) -> None:
    """Write the model as llama.cpp's converter does; `keys` adds or replaces metadata."""
    config = model.config
    architecture = architecture or config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_string
        add(f"{architecture}.{key.replace('__', '.')}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, found in _parameters(model):
        module = name.split(".")[-2]
        is_turned = architecture == "llama" and module in heads
        values = interleaved(found, heads[module]) if is_turned else found
        if values.ndim >= 2 and kind != Kind.F32:
            quantised = gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), quantised, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    if config.rope_parameters["rope_type"] == "llama3":
        plain = spec_from_config({**config.to_diff_dict(), "rope_parameters": None, "rope_theta": 5e5}, "p", "00")
        scaled = spec_from_config(config.to_diff_dict(), "s", "00")
        ropes = [np.float32(spec.layers[0].attention.rope.inv_freq) for spec in (plain, scaled)]  # type: ignore[arg-type]
        writer.add_tensor("rope_freqs.weight", ropes[0] / ropes[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_float_file_is_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name])
    write_gguf(tmp_path / "m.gguf", model)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    wanted = {key: value.detach().numpy() for key, value in model.named_parameters()}
    loaded = dict(checkpoint.tensors())
    assert set(loaded) == set(wanted)
    for key, values in loaded.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, wanted[key])
    from_json = spec_from_config(CONFIGS[name].to_diff_dict(), "m", checkpoint.spec.digest)
    rope = checkpoint.spec.layers[0].attention.rope
    np.testing.assert_allclose(rope.inv_freq, from_json.layers[0].attention.rope.inv_freq, rtol=3e-7)
    if name != "llama":  # GGUF names the bias by its tensors; all else is equal
        assert checkpoint.spec.layers[0].mlp == from_json.layers[0].mlp
    for field in (
        "vocab_size",
        "hidden_size",
        "max_positions",
        "norm_eps",
        "tie_embeddings",
        "eos_token_ids",
        "family",
    ):
        assert getattr(checkpoint.spec, field) == getattr(from_json, field), field
    ours, theirs = checkpoint.spec.layers[1].attention, from_json.layers[1].attention
    for field in ("num_heads", "num_kv_heads", "head_dim", "scale", "qkv_bias", "o_bias", "qk_norm", "window"):
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_the_model_it_was_made_from(name: str, kind: Kind, tmp_path: Path) -> None:
    architecture, config = MIXTURES[name]
    model = random_model(config)
    keys = {"expert_count": 6, "expert_used_count": config.num_experts_per_tok}
    if "moe" in architecture and architecture != "olmoe":
        keys["expert_feed_forward_length"] = 32
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = 64
    write_gguf(tmp_path / "m.gguf", model, kind, architecture, **keys)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    from_json = spec_from_config(config.to_diff_dict() | {"model_type": name}, "m", "")
    assert checkpoint.spec.family == name
    for ours, theirs in zip(checkpoint.spec.layers, from_json.layers, strict=True):
        assert (ours.mlp, ours.experts) == (theirs.mlp, theirs.experts)
        assert (ours.attention.qk_norm, ours.attention.whole_qk_norm) == (
            theirs.attention.qk_norm, theirs.attention.whole_qk_norm,
        )  # fmt: skip
    model.save_pretrained(tmp_path / "folder")
    wanted = dict(load_checkpoint(tmp_path / "folder").tensors())
    found = dict(checkpoint.tensors())
    assert set(found) == set(wanted)
    for key, values in found.items():
        largest = float(np.abs(wanted[key]).max())
        tolerance = 0.0 if kind == Kind.F32 else largest * Q8_0_ERROR
        assert values.shape == wanted[key].shape
        np.testing.assert_allclose(values, wanted[key], atol=tolerance)


def test_a_dense_architecture_with_experts_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_model(CONFIGS["qwen2"]), expert_count=4, expert_used_count=2)
    with pytest.raises(CheckpointError, match="'qwen2' with experts is not supported"):
        load_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_every_stored_type_comes_back_as_the_package_reads_it(kind: Kind, tmp_path: Path) -> None:
    model = random_model(CONFIGS["qwen2"])
    write_gguf(tmp_path / "m.gguf", model, kind)
    wanted = dict(model.named_parameters())
    for key, values in load_checkpoint(tmp_path / "m.gguf").tensors():
        original = wanted[key].detach().numpy()
        if original.ndim == 2:
            original = gguf.dequantize(gguf.quantize(original, kind), kind).reshape(original.shape)
        np.testing.assert_array_equal(values, original)


#: Types that the package reads and does not write: their blocks are made of random bytes.
READ_ONLY = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_S, Kind.IQ2_XS]


@pairwise({"kind": READ_ONLY, "num_rows": [1, 3, 48]}, strength=1)
def test_every_other_type_is_read_as_the_package_reads_it(kind: Kind, num_rows: int, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng().integers(0, 256, (num_rows, 512 // block * block_bytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):  # random scales may be infinite or no number
        values, wanted = read_gguf(tmp_path / "m.gguf").dequantize("t"), gguf.dequantize(raw, kind)
    assert values.shape == (num_rows, 512)
    np.testing.assert_array_equal(values, wanted)


@pytest.mark.nightly  # tiny files of every kind of tensor are compared by day
def test_the_demo_models_tensors_equal_transformers(demo_gguf: Path, demo_transformers: PreTrainedModel) -> None:
    theirs = dict(demo_transformers.named_parameters())
    names = set()
    for name, values in load_checkpoint(demo_gguf).tensors():
        np.testing.assert_array_equal(values, theirs[name].detach().numpy(), err_msg=name)
        names.add(name)
    assert names == set(theirs)


def test_the_demo_models_spec(demo_gguf: Path) -> None:
    spec = load_checkpoint(demo_gguf, "demo").spec
    attention = spec.layers[0].attention
    assert (spec.name, spec.family, len(spec.layers), spec.hidden_size, spec.vocab_size) == (
        "demo", "llama", 30, 576, 49152,
    )  # fmt: skip
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert (spec.tie_embeddings, spec.max_positions, spec.bos_token_id, spec.eos_token_ids) == (True, 8192, 1, (2,))
    assert attention.rope.inv_freq[1] == pytest.approx(100_000 ** (-2 / 64))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention__sliding_window": 128}, r"llama\.attention\.sliding_window' is 128"),
        ({"expert_count": 8}, r"expert_used_count' is None"),
        ({"attention__clamp_kqv": 3}, r"attention\.clamp_kqv' \(3\) is not understood"),
        ({"rope__dimension_count": 16}, r"rope\.dimension_count is 16"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"vocab_size": 95}, r"embed_tokens.*\[96, 64\].*\[95, 64\]"),
    ],
)
def test_metadata_that_would_change_the_result_is_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_model(CONFIGS["llama-tied"]), **keys)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = random_model(CONFIGS["qwen3"])
    del model.model.layers[1].self_attn.k_norm
    write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_norm\.weight"):
        load_checkpoint(tmp_path / "m.gguf")


def test_an_architecture_not_known_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        load_checkpoint(tmp_path / "m.gguf")


def test_a_damaged_file_is_an_error_and_never_a_crash(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_model(CONFIGS["llama-tied"]))
    whole = (tmp_path / "m.gguf").read_bytes()
    header_size = min(tensor.offset for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    broken = tmp_path / "broken.gguf"
    for size in [0, 3, 4, 12, 30, header_size // 3, header_size // 2, header_size - 40, len(whole) - 1]:
        broken.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            load_checkpoint(broken)
    refused = 0
    generator = rng()
    for _ in range(300):  # one byte of the header changed: refused by name, or harmless text
        changed = bytearray(whole)
        changed[generator.integers(header_size)] ^= 1 << int(generator.integers(8))
        broken.write_bytes(changed)
        try:
            load_checkpoint(broken)
        except CheckpointError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("num_layers", [1 << 16, (1 << 31) - 1])
def test_more_layers_than_memory_holds_are_refused_at_once(tmp_path: Path, num_layers: int) -> None:
    write_gguf(tmp_path / "m.gguf", random_model(CONFIGS["llama-tied"]))
    whole = bytearray((tmp_path / "m.gguf").read_bytes())
    key = b"llama.block_count"
    value = whole.index(key) + len(key) + 4  # behind the key stands the value's type, uint32
    whole[value : value + 4] = num_layers.to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=f"claims {num_layers} layers"):
        load_checkpoint(tmp_path / "m.gguf")


def header(**replaced: Any) -> GgufFile:
    """A llama's metadata alone; `replaced` has "__" for "."."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 2.0**-17,
        "llama.vocab_size": 96,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {key.replace("__", "."): value for key, value in replaced.items()}
    return GgufFile(Path("tiny.gguf"), metadata, {}, np.zeros(0, np.uint8))


@pairwise({"value": ["<s>", 1.0, -1, 96, 1 << 63, True, [1]], "key": ["bos", "eos", "eot", "eom"]}, strength=1)
def test_token_ids_that_are_none_are_refused(key: str, value: object) -> None:
    assert spec_from_gguf(header(), "tiny", "00").eos_token_ids == (2,)
    name = f"tokenizer.ggml.{key}_token_id"
    with pytest.raises(CheckpointError, match=rf"{name}' is {re.escape(repr(value))}; .* below 96"):
        spec_from_gguf(header(**{name: value}), "tiny", "00")


@pairwise(
    {
        "value": [1 << 40, 1 << 63],
        "key": [
            "embedding_length",
            "context_length",
            "feed_forward_length",
            "vocab_size",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
        ],
    },
    strength=1,
)
def test_sizes_no_model_has_are_refused_before_anything_is_made_of_them(key: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=rf"'{key}' is {value}; .* 2147483647"):
        spec_from_gguf(header(**{f"llama.{key}": value}), "tiny", "00")


@pytest.mark.parametrize("keys", [{"attention.key_length": 1_000_000}, {"embedding_length": 40_000_000}])
def test_heads_no_model_has_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"heads that are \d+ wide; at most 8192"):
        spec_from_gguf(header(**{f"llama.{key}": value for key, value in keys.items()}), "tiny", "00")
