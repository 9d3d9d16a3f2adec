"""Everything PEFT's LoRA can train, on the GPU engine, side by side in one batch: each row is PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.cuda.backend import CudaBackend
from tests.engine.adapters.formats.test_peft_parity import ALL, BEYOND, OPTIONS, PEFT_WARNINGS, TOLERANCE
from tests.engine.adapters.parity import peft_logits, random_tokens, save_random_adapter, tiny_model
from tests.engine.checkpoints import tiny_model as checkpoint_model
from tests.engine.cpu.test_extra_weights import TOGETHER
from tests.engine.cuda.gpu import gpu_backend_of_model, gpu_config
from tests.engine.served import served_logits
from tests.seeds import rng

pytestmark = PEFT_WARNINGS


def _read(model: Any, backend: CudaBackend, folder: Path, options: dict[str, Any]) -> LoraAdapter:
    config = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 2} | options
    save_random_adapter(model, folder, LoraConfig(**config))
    return read_adapter(folder, backend.spec, supported_features=FEATURES)


@pytest.mark.parametrize(("tied", "batch_invariant"), [(True, False), (False, True)])
def test_every_option_in_one_batch_is_pefts(tmp_path: Path, tied: bool, batch_invariant: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    config = gpu_config(batch_invariant=batch_invariant)
    backend = gpu_backend_of_model(model, tmp_path / "model", config)
    options = {name: settings for name, (settings, _) in BEYOND.items()} | TOGETHER | OPTIONS
    names = [str(name) for name in rng().permutation(list(options))]
    folders = {name: tmp_path / str(index) for index, name in enumerate(names)}
    adapters = {name: _read(model, backend, folders[name], options[name]) for name in names}
    tokens = random_tokens(model, 1, 21)
    served = dict(zip([*names, "base"], served_logits(backend, [*adapters.values(), None], tokens), strict=True))
    for name in names:
        expected = peft_logits(model, folders[name], tokens)
        np.testing.assert_allclose(served[name], expected, rtol=0, atol=2 * TOLERANCE, err_msg=name)
    plain = [name for name in names if not adapters[name].features]
    assert len(plain) == len(OPTIONS)
    without = served_logits(backend, [*(adapters[name] for name in plain), None], tokens)
    for name, logits in zip([*plain, "base"], without, strict=True):
        # Rows without extras are computed as if there were none; bit for bit only where tiles are fixed.
        np.testing.assert_allclose(logits, served[name], rtol=0, atol=0 if batch_invariant else TOLERANCE, err_msg=name)
    if batch_invariant:
        for name in names:
            (alone,) = served_logits(backend, [adapters[name]], tokens)
            np.testing.assert_array_equal(alone, served[name], err_msg=name)
    backend.close()


def test_own_norms_of_heads_are_pefts(tmp_path: Path) -> None:
    model = checkpoint_model("qwen3")
    backend = gpu_backend_of_model(model, tmp_path / "model", gpu_config())
    tokens = random_tokens(model, 1, 21)
    folders = [tmp_path / "q", tmp_path / "both"]
    adapters = [
        _read(model, backend, folders[0], {"target_modules": ALL, "modules_to_save": ["q_norm"]}),
        _read(model, backend, folders[1], {"target_modules": ["q_proj"], "modules_to_save": ["q_norm", "k_norm"]}),
    ]
    base, *served = served_logits(backend, [None, *adapters], tokens)
    for folder, logits in zip(folders, served, strict=True):
        expected = peft_logits(model, folder, tokens)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=5 * TOLERANCE)
        assert np.abs(expected - base).max() > 1e-2
    backend.close()


def test_a_slot_forgets_what_the_adapter_before_had(tmp_path: Path) -> None:
    model = checkpoint_model("llama")
    backend = gpu_backend_of_model(model, tmp_path / "model", gpu_config(batch_invariant=True))
    tokens = random_tokens(model, 1, 9)
    plain = _read(model, backend, tmp_path / "plain", {"target_modules": ALL})
    expected = served_logits(backend, [plain], tokens)[0]
    for index, name in enumerate(("DoRA", "modules_to_save lm_head", "trainable_token_indices", "embedding LoRA")):
        other = _read(model, backend, tmp_path / str(index), BEYOND[name][0])
        assert np.abs(served_logits(backend, [other], tokens)[0] - expected).max() > 1e-3
        np.testing.assert_array_equal(served_logits(backend, [plain], tokens)[0], expected)
    backend.close()
