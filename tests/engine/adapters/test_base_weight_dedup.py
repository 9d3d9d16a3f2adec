"""A matrix that is the base's own is not kept, and nothing else is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine.adapters.base_weight_dedup import BaseWeightDedup
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox.packing import pack_adapter
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.weight_names import EMBEDDING, LM_HEAD
from tests.engine.adapters.parity import random_tokens, tiny_model
from tests.engine.served import CONFIG, served_logits

_SAVED = {name: f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight" for name in (EMBEDDING, LM_HEAD)}


def save_adapter(folder: Path, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """LoRA on both outer matrices, which PEFT saves along with it."""
    vocab, hidden = model.lm_head.weight.shape
    prefix = "base_model.model."
    tensors = {
        f"{prefix}model.embed_tokens.lora_embedding_A": torch.randn(2, vocab),
        f"{prefix}model.embed_tokens.lora_embedding_B": torch.randn(hidden, 2),
        f"{prefix}lm_head.lora_A.weight": torch.randn(2, hidden),
        f"{prefix}lm_head.lora_B.weight": torch.randn(vocab, 2),
    } | {_SAVED[name]: values.detach().clone() for name, values in saved.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["embed_tokens", "lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_dropped_and_the_answers_stay(tmp_path: Path, is_tied: bool, dtype: torch.dtype) -> None:
    model = tiny_model("llama", tie_word_embeddings=is_tied).to(dtype)
    model.save_pretrained(tmp_path / "base")
    checkpoint = load_checkpoint(tmp_path / "base")
    base = {EMBEDDING: model.model.embed_tokens.weight} | ({} if is_tied else {LM_HEAD: model.lm_head.weight})
    save_adapter(tmp_path / "it", model, base)
    adapter = read_adapter(tmp_path / "it", checkpoint.spec, supported_features=FEATURES)
    assert set(adapter.replaced) == {EMBEDDING, LM_HEAD}
    copies = BaseWeightDedup(checkpoint, FEATURES)
    lighter = copies.without_copies(adapter)
    assert not lighter.replaced
    assert lighter.card.digest == adapter.card.digest
    assert lighter.card.extra_bytes < adapter.card.extra_bytes
    weight = model.lm_head.weight
    assert adapter.card.size_bytes - lighter.card.size_bytes == 4 * weight.numel() * len(base)
    packed = pack_adapter(adapter)
    again = copies.without_copies_packed(packed)
    assert again.card == lighter.card
    assert again.arrays[0].nbytes < packed.arrays[0].nbytes - 4 * weight.numel() + 64
    assert copies.without_copies_packed(again) is again
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    heavy, light = served_logits(backend, [adapter, lighter], random_tokens(model))
    np.testing.assert_array_equal(heavy, light)
    backend.close()


def test_one_changed_value_is_kept(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "base")
    checkpoint = load_checkpoint(tmp_path / "base")
    changed = model.lm_head.weight.detach().clone()
    changed[5, 7] = torch.nextafter(changed[5, 7], torch.tensor(9.0))
    save_adapter(tmp_path / "it", model, {EMBEDDING: model.model.embed_tokens.weight, LM_HEAD: changed})
    assert len(load_file(tmp_path / "it" / "adapter_model.safetensors")) == 6
    adapter = read_adapter(tmp_path / "it", checkpoint.spec, supported_features=FEATURES)
    lighter = BaseWeightDedup(checkpoint, FEATURES).without_copies(adapter)
    assert set(lighter.replaced) == {LM_HEAD}
    np.testing.assert_array_equal(lighter.replaced[LM_HEAD], changed.numpy())
