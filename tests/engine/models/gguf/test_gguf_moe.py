"""DeepSeek-V2 and gpt-oss in GGUF: tiny files as llama.cpp's converter writes them, beside the models' folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from app.engine.config import CpuConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.errors import CheckpointError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.gguf import gguf_moe
from app.engine.models.gguf.gguf_file import read_gguf
from app.engine.models.hf import gpt_oss
from tests.engine.adapters.parity import base_logits
from tests.engine.checkpoints import save, tiny_model
from tests.engine.logits_check import steady_prompts
from tests.engine.served import CONFIG, served_logits
from tests.seeds import rng

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
#: Name -> (family of `tiny_model`, changes): sizes that quantised blocks divide, and what a file can say.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "kv_lora_rank": 64, "v_head_dim": 32},
    ),
    "deepseek_v2 query latents": (
        "deepseek_v2 query latents",
        {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "kv_lora_rank": 32, "v_head_dim": 32}
        | {"q_lora_rank": 32, "num_attention_heads": 4, "attention_bias": False}
        | {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "gpt_oss": ("gpt_oss", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}),
}


def model_of(name: str) -> Any:
    """A tiny random one whose epsilon is a float32, as GGUF keeps it."""
    family, changes = MODELS[name]
    model: Any = tiny_model(family, **changes)
    model.config.rms_norm_eps = 2.0**-17
    for path, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and "_a_layernorm" not in path:  # latents' have one of their own
            module.variance_epsilon = 2.0**-17
    return model


def architecture_of(model: Any) -> str:
    return {"deepseek_v2": "deepseek2", "gpt_oss": "gpt-oss"}[model.config.model_type]


def _keys(model: Any, *, splits: bool) -> dict[str, Any]:
    """splits: latents' lengths and halves, as llama.cpp's converter writes them since it keeps latents."""
    config = model.config
    rope = config.rope_parameters
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "expert_used_count": config.num_experts_per_tok,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if config.model_type == "gpt_oss":
        return keys | {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.sliding_window": config.sliding_window,
            "expert_count": config.num_local_experts,
            "expert_feed_forward_length": config.intermediate_size,
        }
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    head = config.qk_nope_head_dim + rotated
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if splits:
        keys |= {"attention.key_length_mla": head, "attention.value_length_mla": config.v_head_dim}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if config.topk_method == "group_limited_greedy":
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return keys | {
        "attention.head_count_kv": 1 if splits else config.num_attention_heads,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated if splits else head,
        "attention.value_length": rank if splits else config.v_head_dim,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 1,
    }


def _parts(model: Any, *, splits: bool) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """(transformers' name with a suffix, a view of the parameter), taken apart and turned as the converter does."""
    is_gpt_oss, config = model.config.model_type == "gpt_oss", model.config
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and is_gpt_oss:
            values = values.swapaxes(1, 2)  # [experts, outputs, inputs]
        if ".experts.gate_up_proj" in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            half = values.shape[1] // 2
            for n, module in enumerate(("gate_proj", "up_proj")):
                part = values[:, n::2] if is_gpt_oss else values[:, n * half : (n + 1) * half]
                yield f"{name.partition('.gate_up_proj')[0]}.{module}.{kind}", part
        elif ".experts.down_proj" in name:
            yield name.removesuffix("_bias") + (".bias" if name.endswith("_bias") else ".weight"), values
        elif name.endswith("self_attn.sinks"):
            yield f"{name}.weight", values
        elif name.endswith("kv_b_proj.weight") and splits:
            heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            yield name.replace("kv_b", "k_b"), heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), heads[:, config.qk_nope_head_dim :]
        else:
            yield name, values


def write(path: Path, model: Any, kind: Kind = Kind.F32, *, splits: bool = True, **changes: Any) -> None:
    """Matrices are quantised to `kind` where it divides them, and the model takes what is read back.

    changes: keys of the metadata, with "__" for "."; None leaves a key out.
    """
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_keys(model, splits=splits) | {k.replace("__", "."): v for k, v in changes.items()}).items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
            add[type(value)](f"{architecture}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    (own,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(own, model.config.num_hidden_layers)
    for name, part in _parts(model, splits=splits):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if part.ndim > 1 and kind != Kind.F32 and part.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            quantised = gguf.quantize(np.ascontiguousarray(part), kind)
            writer.add_tensor(stored, quantised, raw_dtype=kind)
            part[...] = gguf.dequantize(quantised, kind).reshape(part.shape)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(part))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("splits", [True, False], ids=["latents", "before latents"])
@pytest.mark.parametrize("name", MODELS)
def test_a_float_file_is_the_folder_it_was_made_from(name: str, splits: bool, tmp_path: Path) -> None:
    model = model_of(name)
    write(tmp_path / "m.gguf", model, splits=splits)
    folder, file = load_checkpoint(save(model, tmp_path / "folder"), "m"), load_checkpoint(tmp_path / "m.gguf", "m")
    assert replace(file.spec, digest=folder.spec.digest) == folder.spec
    wanted, found = dict(folder.tensors()), dict(file.tensors())
    assert set(found) == set(wanted)
    for key, values in found.items():
        np.testing.assert_array_equal(values, wanted[key], err_msg=key)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_files_logits_are_transformers_with_its_weights(name: str, kind: Kind, tmp_path: Path) -> None:
    model = model_of(name)
    write(tmp_path / "m.gguf", model, kind)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    config = CONFIG.on(CpuConfig(weight_dtype="float32"))  # how weights are stored is `cpu/test_weights.py`'s
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), config)
    tokens = torch.from_numpy(np.stack(steady_prompts(model, rng(), (40, 40))))
    (logits,) = served_logits(backend, [None], tokens)
    backend.close()
    assert np.abs(logits - base_logits(model, tokens)).max() <= 1e-4


def test_mxfp4_blocks_are_those_of_a_folder_in_another_order(tmp_path: Path) -> None:
    """A folder's byte has two neighbours, GGUF's the i-th and the (16 + i)-th of 32."""
    blocks = rng().integers(0, 256, (6, 3, 16), dtype=np.uint8)
    scales = rng().integers(2, 250, (6, 3), dtype=np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(6, 3, 32)
    rows = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1).reshape(6, -1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt-oss")
    writer.add_tensor("t", rows, raw_dtype=Kind.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(
        read_gguf(tmp_path / "m.gguf").dequantize("t"), gpt_oss.dequantize_mxfp4(blocks, scales)
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v2", {"attention__kv_lora_rank": None}, r"deepseek2\.attention\.kv_lora_rank' is missing"),
        ("deepseek_v2", {"attention__kv_lora_rank": "64"}, "kv_lora_rank' is '64'; an integer"),
        ("deepseek_v2", {"attention__key_length": 64}, "key_length is 64 and value_length 64; latents of 64"),
        ("deepseek_v2", {"expert_gating_func": 2}, "expert_gating_func' is 2; only 1"),
        ("deepseek_v2", {"expert_weights_norm": True}, "expert_weights_norm' is True; only False"),
        ("deepseek_v2", {"nextn_predict_layers": 1}, r"nextn_predict_layers' \(1\) is not understood"),
        ("deepseek_v2", {"rope__scaling__type": "yarn"}, r"rope\.scaling\.factor' is missing"),
        ("deepseek_v2", {"expert_group_count": 4, "expert_group_used_count": 9}, "n_group is 4 and topk_group 9"),
        ("deepseek_v2 query latents", {"rope__scaling__yarn_log_multiplier": None}, "yarn_log_multiplier' is missing"),
        ("deepseek_v2 query latents", {"expert_group_used_count": None}, "expert_group_used_count' is missing"),
        ("gpt_oss", {"attention__sliding_window": None}, r"gpt-oss\.attention\.sliding_window' is missing"),
        ("gpt_oss", {"expert_gating_func": 1}, "expert_gating_func' is 1; only 3"),
        ("gpt_oss", {"attention__sliding_window_pattern": 4}, r"sliding_window_pattern' \(4\) is not understood"),
        ("gpt_oss", {"embedding_length": 0}, "hidden_size.* is 0"),
    ],
)
def test_metadata_that_is_missing_or_not_understood_is_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", model_of(name), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "m.gguf")


def test_a_half_without_the_other_is_refused() -> None:
    half = "model.layers.1.self_attn.k_b_proj.weight"
    with pytest.raises(CheckpointError, match=r"k_b_proj\.weight' is \[4, 64, 32\] and .*v_b_proj\.weight' \[\]"):
        gguf_moe.whole_shapes({half: (4, 64, 32)})
    alone = {half.replace("k_b", "v_b"): (4, 32, 64)}
    assert gguf_moe.whole_shapes(alone) == alone, "to be refused by its name"
