"""Gemma in GGUF: tiny files written by the `gguf` package, beside the folder and the model they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from app.engine.cpu.backend import CpuBackend
from app.engine.errors import CheckpointError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.gguf.gguf_file import read_gguf
from app.engine.models.gguf.gguf_model import spec_from_gguf
from tests.engine.adapters.parity import base_logits, random_tokens
from tests.engine.checkpoints import save, tiny_model
from tests.engine.served import CONFIG, served_logits

ARCHITECTURES = {"gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3}
#: What GGUF cannot say, as llama.cpp takes it to be.
SETTINGS: dict[str, dict[str, int]] = {
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6, "num_hidden_layers": 7},
}


def model_of(family: str, **changes: int) -> torch.nn.Module:
    """A tiny one that a file can describe; its epsilon is a float32."""
    model = tiny_model(family, **(SETTINGS[family] | changes))
    model.config.rms_norm_eps = 2.0**-17  # type: ignore[union-attr, assignment]
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 2.0**-17  # type: ignore[assignment]
    return model


def write_gemma(path: Path, family: str, model: Any, kind: Kind = Kind.F32, **keys: Any) -> None:
    """As llama.cpp's converter writes it; matrices quantised to `kind`. A key of None is left out."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
    }
    if family == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    else:
        values["rope.freq_base"] = 1_000_000.0
    for key, value in (values | {key.replace("__", "."): value for key, value in keys.items()}).items():
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{family}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        found = parameter.detach().numpy()
        own = names.get_name(name, try_suffixes=(".weight",))
        if name.endswith("norm.weight"):
            writer.add_tensor(own, np.float32(1) + found)
        elif kind == Kind.F32:
            writer.add_tensor(own, found)
        else:
            writer.add_tensor(own, gguf.quantize(found, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_float_file_is_the_folder_it_was_made_from(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    write_gemma(tmp_path / "m.gguf", family, model)
    folder, file = load_checkpoint(save(model, tmp_path / "folder"), "m"), load_checkpoint(tmp_path / "m.gguf", "m")
    assert replace(file.spec, digest=folder.spec.digest) == folder.spec
    wanted, found = dict(folder.tensors()), dict(file.tensors())
    assert set(found) == set(wanted)
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name], err_msg=name)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_a_quantised_files_logits_are_transformers_with_its_weights(family: str, kind: Kind, tmp_path: Path) -> None:
    model = model_of(family, hidden_size=64, intermediate_size=96, head_dim=32, query_pre_attn_scalar=32)
    write_gemma(tmp_path / "m.gguf", family, model, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                read = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(read.reshape(parameter.shape)))
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    tokens = random_tokens(model, length=40)
    (logits,) = served_logits(backend, [None], tokens)
    backend.close()
    assert np.abs(logits - base_logits(model, tokens)).max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gemma3", {"attention__sliding_window": None}, r"gemma3\.attention\.sliding_window' is missing"),
        ("gemma3", {"attention__sliding_window": 0}, "'sliding_window' is 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "without it"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "'final_logit_softcapping' is -1"),
        ("gemma2", {"attention__scale": 0.5}, r"gemma2\.attention\.scale' \(0\.5\) is not understood"),
        ("gemma3", {"attention__sliding_window_pattern": 0}, r"sliding_window_pattern' is 0"),
    ],
)
def test_metadata_that_is_not_understood_is_named(
    family: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gemma(tmp_path / "m.gguf", family, model_of(family), **keys)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "m.gguf")


def test_what_the_file_says_of_windows_and_ropes_is_taken(tmp_path: Path) -> None:
    keys = {"attention__sliding_window_pattern": 2, "rope__freq_base_swa": 5_000.0, "final_logit_softcapping": 4.0}
    write_gemma(tmp_path / "m.gguf", "gemma3", model_of("gemma3"), **keys)
    spec = load_checkpoint(tmp_path / "m.gguf").spec
    assert [layer.attention.window for layer in spec.layers] == [21, None, 21, None, 21, None, 21]
    assert spec.layers[0].attention.rope.inv_freq[1] == pytest.approx(5_000 ** (-2 / 24))
    assert spec.layers[1].attention.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 24))
    assert spec.logit_softcap == 4.0


@pytest.mark.parametrize(("family", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_models_of_27_billion_scale_scores_by_hidden_size_per_head(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    write_gemma(tmp_path / "m.gguf", family, model_of(family, num_hidden_layers=num_layers))
    assert load_checkpoint(tmp_path / "m.gguf").spec.layers[0].attention.scale == (40 / 4) ** -0.5


def test_the_end_of_a_turn_ends_a_sequence_where_there_is_a_chat_template(tmp_path: Path) -> None:
    write_gemma(tmp_path / "m.gguf", "gemma3", model_of("gemma3"))
    file = read_gguf(tmp_path / "m.gguf")
    metadata = {**file.metadata, "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "a", "<end_of_turn>"]}
    base = replace(file, metadata=metadata)
    instructed = replace(file, metadata={**metadata, "tokenizer.chat_template": "{{ messages }}"})
    assert spec_from_gguf(base, "base", "00").eos_token_ids == (2,)
    assert spec_from_gguf(instructed, "it", "00").eos_token_ids == (2, 4)
