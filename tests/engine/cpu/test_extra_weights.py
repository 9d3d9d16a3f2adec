"""Everything PEFT's LoRA can train, side by side in one batch: each row is PEFT's, and pays for itself only."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox.packing import pack_adapter, unpack_adapter
from app.engine.config import CpuConfig
from app.engine.cpu.backend import CpuBackend
from tests.engine.adapters.formats.test_peft_parity import (
    ALL,
    BEYOND,
    FUSED,
    HALVES,
    OPTIONS,
    PEFT_WARNINGS,
    TOLERANCE,
    halve,
)
from tests.engine.adapters.parity import (
    base_logits,
    fused_twin,
    peft_logits,
    random_tokens,
    save_random_adapter,
    tiny_model,
)
from tests.engine.checkpoints import tiny_model as checkpoint_model
from tests.engine.served import CONFIG, backend_of, served_logits
from tests.seeds import rng

pytestmark = PEFT_WARNINGS

#: Options that meet in one adapter.
TOGETHER: dict[str, dict[str, Any]] = {
    "DoRA, trained biases and norms": {
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "use_dora": True,
        "bias": "all",
        "modules_to_save": ["norm", "post_attention_layernorm"],
    },
    "lm_head LoRA and token rows": {
        "target_modules": ["v_proj", "lm_head"],
        "trainable_token_indices": {"embed_tokens": [7, 3, 90]},
    },
    "every linear module of a layer": {
        "target_modules": ["layers.0.self_attn.q_proj"],
        "modules_to_save": [f"layers.1.self_attn.{name}" for name in ALL[:4]]
        + [f"layers.1.mlp.{name}" for name in ALL[4:]],
    },
}


def _read(model: Any, backend: CpuBackend, folder: Path, options: dict[str, Any]) -> LoraAdapter:
    config = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 2} | options
    save_random_adapter(model, folder, LoraConfig(**config))
    return read_adapter(folder, backend.spec, supported_features=FEATURES)


@pytest.mark.parametrize("tied", [True, False])
def test_every_option_in_one_batch_is_pefts_and_leaves_the_others_alone(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    twin = fused_twin(model)
    wide = CONFIG.model_copy(update={"max_num_batched_tokens": 2048, "max_num_seqs": 2048})
    backend = backend_of(model, tmp_path / "model", wide)
    options = OPTIONS | {name: settings for name, (settings, _) in BEYOND.items()} | TOGETHER | FUSED
    options |= dict.fromkeys(HALVES, OPTIONS["plain LoRA"])
    names = [str(name) for name in rng().permutation(list(options))]
    folders = {name: tmp_path / str(index) for index, name in enumerate(names)}
    trained = {name: twin if name in FUSED else model for name in names}
    adapters = {}
    for name in names:
        adapters[name] = _read(trained[name], backend, folders[name], options[name])
        if name in HALVES:
            halve(folders[name], HALVES[name])
            adapters[name] = read_adapter(folders[name], backend.spec)
    tokens = random_tokens(model, 1, 21)
    np.testing.assert_allclose(base_logits(twin, tokens), base_logits(model, tokens), rtol=0, atol=TOLERANCE)

    served = dict(zip([*names, "base"], served_logits(backend, [*adapters.values(), None], tokens), strict=True))
    for name in names:
        np.testing.assert_allclose(
            served[name], peft_logits(trained[name], folders[name], tokens), rtol=0, atol=TOLERANCE, err_msg=name
        )
    # Rows without extras are computed as if there were none: the bits of a batch that has none.
    plain = [name for name in names if not adapters[name].features]
    assert len(plain) == len(OPTIONS) + len(FUSED) + len(HALVES)
    without = served_logits(backend, [*(adapters[name] for name in plain), None], tokens)
    for name, logits in zip([*plain, "base"], without, strict=True):
        np.testing.assert_array_equal(logits, served[name], err_msg=name)
    # And each is alone what it is in batches.
    for name in names:
        (alone,) = served_logits(backend, [adapters[name]], tokens)
        np.testing.assert_array_equal(alone, served[name], err_msg=name)


def test_a_batch_beyond_the_engines_limits_is_not_computed(tmp_path: Path) -> None:
    """The kernels would write behind their arrays."""
    model = tiny_model("qwen2")
    small = CONFIG.model_copy(update={"max_num_batched_tokens": 41, "max_num_seqs": 64})
    backend = backend_of(model, tmp_path / "model", small)
    assert len(served_logits(backend, [None], random_tokens(model, 1, 41))) == 1
    with pytest.raises(AssertionError, match="how long their arrays are"):
        served_logits(backend, [None, None], random_tokens(model, 1, 21))


def test_own_norms_of_heads_are_pefts(tmp_path: Path) -> None:
    model = checkpoint_model("qwen3")
    backend = backend_of(model, tmp_path / "model")
    tokens = random_tokens(model, 1, 21)
    folders = [tmp_path / "q", tmp_path / "both"]
    adapters = [
        _read(model, backend, folders[0], {"target_modules": ALL, "modules_to_save": ["q_norm"]}),
        _read(model, backend, folders[1], {"target_modules": ["q_proj"], "modules_to_save": ["q_norm", "k_norm"]}),
    ]
    base, *served = served_logits(backend, [None, *adapters], tokens)
    for folder, logits in zip(folders, served, strict=True):
        expected = peft_logits(model, folder, tokens)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=3 * TOLERANCE)
        assert np.abs(expected - base).max() > 1e-2
    np.testing.assert_array_equal(served_logits(backend, [None], tokens)[0], base)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_held_is_what_the_card_says(tmp_path: Path, tied: bool) -> None:
    """And an adapter that came through another process's memory is held in this one's own."""
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    backend = backend_of(model, tmp_path / "model")
    extras = backend._extras
    grown = copy.deepcopy(model)
    grown.resize_token_embeddings(backend.spec.vocab_size + 5, mean_resizing=False)
    whole = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    cases = {**{name: settings for name, (settings, _) in BEYOND.items()}, **TOGETHER, "a grown vocabulary": whole}
    for index, (name, settings) in enumerate(cases.items()):
        adapter = _read(grown if settings is whole else model, backend, tmp_path / str(index), settings)
        adapter = unpack_adapter(*pack_adapter(adapter))
        backend.write_adapter(1, 0, adapter)
        assert sum(array.nbytes for array in extras._held[1]) == adapter.card.extra_bytes > 0, name
        assert not any(
            np.shares_memory(array, given) for array in extras._held[1] for given in adapter.replaced.values()
        )
    backend.release_adapter(1)
    assert not extras._held
    assert not any(table.any() for table in extras.tables)
    plain = _read(model, backend, tmp_path / "plain", {"target_modules": ALL})
    backend.write_adapter(1, 0, plain)
    assert not extras._held
    assert plain.card.extra_bytes == 0


def test_a_slot_forgets_the_extras_of_the_adapter_before(tmp_path: Path) -> None:
    model = tiny_model("llama")
    backend = backend_of(model, tmp_path / "model")
    tokens = random_tokens(model, 1, 9)
    plain = _read(model, backend, tmp_path / "plain", {"target_modules": ALL})
    expected = served_logits(backend, [plain], tokens)[0]
    for index, name in enumerate(("DoRA", "modules_to_save lm_head", "trainable_token_indices", "embedding LoRA")):
        other = _read(model, backend, tmp_path / str(index), BEYOND[name][0])
        assert np.abs(served_logits(backend, [other], tokens)[0] - expected).max() > 1e-3
        np.testing.assert_array_equal(served_logits(backend, [plain], tokens)[0], expected)


def test_dora_on_a_base_in_8_bits_takes_the_norms_of_what_is_multiplied(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    rounded = backend_of(model, tmp_path / "model", CONFIG.on(CpuConfig(weight_dtype="int8")))
    exact = backend_of(model, tmp_path / "model")
    adapter = _read(model, exact, tmp_path / "adapter", BEYOND["DoRA"][0])
    for backend in (exact, rounded):
        backend.write_adapter(1, 0, adapter)
    scales = [_scales(backend) for backend in (exact, rounded)]
    np.testing.assert_allclose(scales[1], scales[0], rtol=0.05)
    assert (scales[0] != scales[1]).any()


def _scales(backend: CpuBackend) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in backend._extras._held[1]])
