"""DoRA and biases on the JAX engine: PEFT's logits; whatever else adapters may do is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from peft import LoraConfig

from app.engine.adapters.adapter import LoraKey, TokenRows
from app.engine.adapters.base_weight_dedup import BaseWeightDedup
from app.engine.adapters.features import FEATURES, XLA_FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig, XlaConfig
from app.engine.errors import AdapterMismatch
from app.engine.factory import served_features
from app.engine.models.checkpoint import load_checkpoint
from app.engine.xla.backend import XlaBackend
from app.engine.xla.base_weights import XlaBaseWeights
from app.engine.xla.sharding import make_mesh
from app.kernels.dora.reference import dora_scale
from tests.engine.adapters.formats.test_peft_parity import BEYOND, OPTIONS, PEFT_WARNINGS, TOLERANCE
from tests.engine.adapters.parity import peft_logits, random_tokens, save_random_adapter, spec_of, tiny_model
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.cpu.test_extra_weights import _read
from tests.engine.served import CONFIG, backend_of, served_logits
from tests.engine.xla.tiny_backends import tiny_backend
from tests.seeds import rng

pytestmark = PEFT_WARNINGS

#: What PEFT is asked for, by name, of what this engine serves.
OWN = {name: settings for name, (settings, features) in BEYOND.items() if features <= XLA_FEATURES} | {
    "DoRA and trained biases": {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_dora": True, "bias": "all"}
}


def jax_config() -> EngineConfig:
    """One shape of step, whatever is in it."""
    shared = CONFIG.model_copy(update={"max_num_batched_tokens": 512, "max_num_seqs": 512})
    return shared.on(XlaConfig(skip_precompile=True))


def jax_backend(folder: Path, config: EngineConfig) -> XlaBackend:
    """For the checkpoint that `backend_of` has saved; every step has the largest shape."""
    checkpoint = load_checkpoint(folder)
    backend = XlaBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))
    backend.programs.buckets = backend.programs.buckets[-1:]
    return backend


@pytest.mark.parametrize("tied", [True, False])
def test_all_kinds_in_one_batch_are_pefts(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    reader = backend_of(model, tmp_path / "model")
    backend = jax_backend(tmp_path / "model", jax_config())
    options = OWN | {"plain": OPTIONS["plain LoRA"]}
    assert len(options) >= 6
    names = [str(name) for name in rng().permutation(list(options))]
    folders = {name: tmp_path / str(index) for index, name in enumerate(names)}
    adapters = {name: _read(model, reader, folders[name], options[name]) for name in names}
    tokens = random_tokens(model, 1, 21)
    served = dict(zip([*names, "base"], served_logits(backend, [*adapters.values(), None], tokens), strict=True))
    for name in names:
        expected = peft_logits(model, folders[name], tokens)
        np.testing.assert_allclose(served[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
        assert np.abs(expected - served["base"]).max() > 1e-3, name
    # A slot forgets the scales and shifts of the adapter before.
    (plain,) = served_logits(backend, [adapters["plain"]], tokens)
    np.testing.assert_allclose(plain, served["plain"], rtol=0, atol=TOLERANCE)
    backend.close()


@pytest.mark.parametrize("rank", [1, 5, 40])
def test_dora_scales_are_the_definitions(rank: int) -> None:
    spec = tiny_spec()
    tensors = dict(random_tensors(spec, 3))
    config = EngineConfig(num_kv_blocks=8, lora_pool_rows=8, xla=XlaConfig(skip_precompile=True))
    backend = XlaBackend(spec, list(tensors.items()), config, make_mesh(jax.devices("cpu"), 1))
    base = backend._adapters._base
    assert isinstance(base, XlaBaseWeights)
    adapter = random_adapter(spec, rank)
    for key in (LoraKey(1, "k_proj"), LoraKey(0, "o_proj"), LoraKey(1, "up_proj"), LoraKey(0, "down_proj")):
        pair = adapter.weights[key]
        block = "mlp" if key.target in ("up_proj", "down_proj") else "self_attn"
        w = tensors[f"model.layers.{key.layer}.{block}.{key.target}.weight"]
        magnitude = np.random.default_rng(4).normal(1, 0.3, len(w)).astype(np.float32)
        expected = dora_scale(magnitude, w, pair.a, pair.b)
        np.testing.assert_allclose(base.dora_scale(key, magnitude, pair), expected, rtol=1e-5)
        assert base.bias(key) is None
    backend.close()


def test_what_is_not_served_is_refused_by_name_when_an_adapter_is_written() -> None:
    spec = tiny_spec()
    plain = random_adapter(spec, 4)
    rows = np.zeros((2, spec.hidden_size), np.float32)
    adapter = dataclasses.replace(plain, token_rows={"embed_tokens": TokenRows((3, 5), rows)})
    config = EngineConfig(num_kv_blocks=8, lora_pool_rows=8, xla=XlaConfig(skip_precompile=True))
    backend = tiny_backend(config, spec)
    for refuses in (backend.prepare_adapter, lambda adapter: backend.write_adapter(1, 0, adapter)):
        with pytest.raises(AdapterMismatch, match=r"xla engine does not serve trained token rows; use engine\.cpu"):
            refuses(adapter)
    with pytest.raises(AdapterMismatch, match="in layer 2"):
        backend.prepare_adapter(random_adapter(tiny_spec(3), 4))
    backend.close()


def test_extras_are_refused_by_name_where_there_is_no_memory_for_them() -> None:
    spec = tiny_spec()
    plain = random_adapter(spec, 4)
    key = next(iter(plain.weights))
    adapter = dataclasses.replace(plain, delta_biases={key: np.ones(plain.weights[key].b.shape[1], np.float32)})
    config = EngineConfig(num_kv_blocks=8, lora_pool_rows=8, extra_weights_bytes=0, xla=XlaConfig(skip_precompile=True))
    backend = tiny_backend(config, spec)
    with pytest.raises(AdapterMismatch, match="extra_weights_bytes 0 cannot apply lora_bias"):
        backend.write_adapter(1, 0, adapter)
    backend.close()


def test_extras_without_rank_rows_are_refused() -> None:
    spec = tiny_spec()
    adapter = dataclasses.replace(
        random_adapter(spec, 4), weights={}, replaced={"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    )
    backend = tiny_backend(EngineConfig(num_kv_blocks=8, lora_pool_rows=8, xla=XlaConfig(skip_precompile=True)), spec)
    with pytest.raises(AdapterMismatch, match="trained biases besides rank rows only"):
        backend.prepare_adapter(adapter)
    backend.close()


def test_every_feature_is_served_or_refused_when_an_adapter_is_read(tmp_path: Path) -> None:
    assert served_features(EngineConfig()) == FEATURES
    served = served_features(EngineConfig(xla=XlaConfig()))
    assert served == XLA_FEATURES < FEATURES
    model = tiny_model("llama")
    refused = {name: case for name, case in BEYOND.items() if not case[1] <= XLA_FEATURES}
    assert refused
    model.save_pretrained(tmp_path / "base")
    copies = BaseWeightDedup(load_checkpoint(tmp_path / "base"), served)  # whole matrices are judged by their values
    for index, (settings, features) in enumerate(refused.values()):
        folder = tmp_path / str(index)
        save_random_adapter(
            model, folder, LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 2} | settings))
        )
        with pytest.raises(AdapterMismatch, match=f"cannot apply .*{sorted(features - XLA_FEATURES)[0]}.*engine.cpu"):
            copies.without_copies(read_adapter(folder, spec_of(model), supported_features=served))
