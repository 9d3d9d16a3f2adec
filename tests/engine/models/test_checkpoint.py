"""Loading tiny random checkpoints that transformers wrote."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from app.engine.errors import CheckpointError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download import digest as digest_module
from tests.pairwise import pairwise
from tests.seeds import any_seed

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def write(
    config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB"
) -> dict[str, torch.Tensor]:
    """Random weights saved as transformers saves them; returns its parameters."""
    torch.manual_seed(any_seed())
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return dict(model.named_parameters())


@pairwise({"name": CONFIGS, "max_shard_size": ["1GB", "40KB"], "dtype": [torch.float32, torch.bfloat16, torch.float16]})
def test_tensors_are_those_transformers_saved(
    name: str, max_shard_size: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    parameters = write(CONFIGS[name], tmp_path, dtype, max_shard_size)
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert (num_files > 1) == (max_shard_size == "40KB")
    checkpoint = load_checkpoint(tmp_path)
    loaded = dict(checkpoint.tensors())
    assert set(loaded) == set(parameters)
    wanted = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}[dtype]
    for key, values in loaded.items():
        assert values.dtype == wanted
        np.testing.assert_array_equal(values.astype(np.float32), parameters[key].detach().float().numpy())
    assert checkpoint.spec.name == tmp_path.name


def test_the_digest_follows_the_contents(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    write(CONFIGS["llama"], tmp_path / "a")
    for folder in ("b", "c"):
        for file in (tmp_path / "a").iterdir():
            (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    a, b, c = (load_checkpoint(tmp_path / folder).spec.digest for folder in ("a", "b", "c"))
    assert a == b
    assert a != c
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert load_checkpoint(tmp_path / "b").spec.digest != a


def test_a_second_start_does_not_read_the_weights_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CONFIGS["mistral"], tmp_path)
    first = load_checkpoint(tmp_path).spec.digest
    calls: list[object] = []
    original = digest_module.hashlib.file_digest
    monkeypatch.setattr(digest_module.hashlib, "file_digest", lambda *a: (calls.append(a), original(*a))[1])
    assert load_checkpoint(tmp_path).spec.digest == first
    assert not calls
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(time.time_ns(), time.time_ns() + 1_000_000_000))
    assert load_checkpoint(tmp_path).spec.digest != first
    assert calls


def test_a_broken_remembered_digest_is_recomputed(tmp_path: Path) -> None:
    write(CONFIGS["mistral"], tmp_path)
    first = load_checkpoint(tmp_path).spec.digest
    (sidecar,) = tmp_path.glob(".*.sha256.json")
    for broken in ("", "[]", '{"identity": 1, "sha256": "00"}', sidecar.read_text().replace('"sha256": "', '"x": "')):
        sidecar.write_text(broken)
        assert load_checkpoint(tmp_path).spec.digest == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (lambda t: t.update({"model.layers.0.extra.weight": np.zeros(1)}), r"layers\.0\.extra"),
        (lambda t: t.update({"model.layers.9.input_layernorm.weight": np.zeros(48, np.float32)}), r"layers\.9"),
        (lambda t: t.update({"model.norm.weight": np.zeros(47, np.float32)}), r"model\.norm\.weight.*\[47\].*\[48\]"),
        (lambda t: t.update({"model.norm.weight": np.zeros(48, np.int8)}), r"model\.norm\.weight.*I8"),
        (lambda t: t.pop("lm_head.weight"), r"lacks 'lm_head\.weight'"),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    write(CONFIGS["mistral"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(
        {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in tensors.items()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_inert(tmp_path: Path) -> None:
    parameters = write(CONFIGS["mistral"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(dict(load_checkpoint(tmp_path).tensors())) == set(parameters)


def test_a_tied_lm_head_may_be_stored_only_if_equal(tmp_path: Path) -> None:
    write(CONFIGS["llama-tied"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in dict(load_checkpoint(tmp_path).tensors())
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../escape.safetensors", "/etc/passwd", "model.bin", "gone.safetensors"])
def test_an_index_that_points_elsewhere_is_refused(shard: str, tmp_path: Path) -> None:
    write(CONFIGS["mistral"], tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.bin|escape|passwd|gone"):
        load_checkpoint(tmp_path)


def test_an_index_that_misplaces_a_tensor_is_refused(tmp_path: Path) -> None:
    write(CONFIGS["mistral"], tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, file = "model.norm.weight", content["weight_map"]["model.norm.weight"]
    content["weight_map"][name] = next(other for other in content["weight_map"].values() if other != file)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_checkpoint(tmp_path)


def test_what_is_not_a_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no base model"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        load_checkpoint(tmp_path)
    (tmp_path / "file.gguf").write_bytes(b"GGML and more")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_checkpoint(tmp_path / "file.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_checkpoint(tmp_path / "empty.gguf")
