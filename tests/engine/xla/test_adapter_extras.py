"""Everything PEFT's LoRA can train, on the JAX engine: PEFT's logits, and in its CPU form the torch engine's bits."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from app.engine.config import EngineConfig, XlaConfig
from app.engine.models.checkpoint import load_checkpoint
from app.engine.xla.backend import JaxBackend
from app.engine.xla.sharding import make_mesh
from app.kernels.matmul.quantised import Quantised
from tests.engine.adapters.formats.test_peft_parity import ALL, BEYOND, OPTIONS, PEFT_WARNINGS, TOLERANCE
from tests.engine.adapters.parity import peft_logits, random_tokens, tiny_model
from tests.engine.checkpoints import tiny_model as checkpoint_model
from tests.engine.cpu.test_extras import TOGETHER, _read
from tests.engine.cuda.grids import put_on_grids
from tests.engine.served import CONFIG, backend_of, served_logits

pytestmark = PEFT_WARNINGS

#: Few KV blocks and one shape of step.
JAX_CONFIG = CONFIG.on(XlaConfig(skip_precompile=True))


#: One shape of step, whatever is in it; little more memory than the adapters of a test take.
XLA_CONFIG = CONFIG.on(XlaConfig(form="xla", skip_precompile=True)).model_copy(
    update={"max_batch_tokens": 512, "max_batch_sequences": 512, "adapter_extra_bytes": 1 << 20}
)


def jax_backend(folder: Path, config: EngineConfig = JAX_CONFIG) -> JaxBackend:
    """For the checkpoint that `backend_of` has saved."""
    checkpoint = load_checkpoint(folder)
    return JaxBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))


def xla_backend(folder: Path, config: EngineConfig = XLA_CONFIG) -> JaxBackend:
    backend = jax_backend(folder, config)
    backend.programs.buckets = backend.programs.buckets[-1:]
    return backend


@pytest.mark.parametrize(("tied", "in_8_bits"), [(True, False), (False, False), (True, True)])
def test_all_kinds_in_one_batch_are_pefts_and_have_the_torch_engines_bits(
    tmp_path: Path, tied: bool, in_8_bits: bool
) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    torch_backend = backend_of(put_on_grids(model) if in_8_bits else model, tmp_path / "model")
    backend = jax_backend(tmp_path / "model")
    assert isinstance(backend._weights.layers.down, Quantised) == in_8_bits
    options = {name: settings for name, (settings, _) in BEYOND.items()} | TOGETHER | {"plain": OPTIONS["plain LoRA"]}
    names = [str(name) for name in np.random.default_rng().permutation(list(options))]
    folders = {name: tmp_path / str(index) for index, name in enumerate(names)}
    adapters = {name: _read(model, torch_backend, folders[name], options[name]) for name in names}
    tokens = random_tokens(model, 1, 21)

    served, theirs = (
        dict(zip([*names, "base"], served_logits(one, [*adapters.values(), None], tokens), strict=True))
        for one in (backend, torch_backend)
    )
    for name in names:
        expected = peft_logits(model, folders[name], tokens)
        np.testing.assert_allclose(served[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
        np.testing.assert_array_equal(served[name], theirs[name], err_msg=name)
        # Each is alone what it is in company.
        (alone,) = served_logits(backend, [adapters[name]], tokens)
        np.testing.assert_array_equal(alone, served[name], err_msg=name)
    np.testing.assert_array_equal(served["base"], theirs["base"])
    # A slot forgets the extras of the adapter before.
    (plain,) = served_logits(backend, [adapters["plain"]], tokens)
    np.testing.assert_array_equal(plain, served["plain"])


@pytest.mark.parametrize("tied", [True, False])
def test_all_kinds_in_one_batch_are_pefts_in_the_xla_form(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    reader = backend_of(model, tmp_path / "model")
    backend = xla_backend(tmp_path / "model")
    options = {name: settings for name, (settings, _) in BEYOND.items()} | TOGETHER | {"plain": OPTIONS["plain LoRA"]}
    names = [str(name) for name in np.random.default_rng().permutation(list(options))]
    folders = {name: tmp_path / str(index) for index, name in enumerate(names)}
    adapters = {name: _read(model, reader, folders[name], options[name]) for name in names}
    tokens = random_tokens(model, 1, 21)
    served = dict(zip([*names, "base"], served_logits(backend, [*adapters.values(), None], tokens), strict=True))
    for name in names:
        expected = peft_logits(model, folders[name], tokens)
        np.testing.assert_allclose(served[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
        (alone,) = served_logits(backend, [adapters[name]], tokens)
        np.testing.assert_array_equal(alone, served[name], err_msg=name)
    for name, adapter in (("plain", adapters["plain"]), ("base", None)):
        (without,) = served_logits(backend, [adapter], tokens)
        np.testing.assert_array_equal(without, served[name], err_msg=name)


def test_own_norms_of_heads_are_pefts_in_the_xla_form(tmp_path: Path) -> None:
    model = checkpoint_model("qwen3")
    reader = backend_of(model, tmp_path / "model")
    tokens = random_tokens(model, 1, 21)
    folders = [tmp_path / "q", tmp_path / "both"]
    options = (
        {"target_modules": ALL, "modules_to_save": ["q_norm"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["q_norm", "k_norm"]},
    )
    adapters = [_read(model, reader, folder, settings) for folder, settings in zip(folders, options, strict=True)]
    base, *served = served_logits(xla_backend(tmp_path / "model"), [None, *adapters], tokens)
    for folder, logits in zip(folders, served, strict=True):
        expected = peft_logits(model, folder, tokens)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=3 * TOLERANCE)
        assert np.abs(expected - base).max() > 1e-2


def test_own_norms_of_heads_have_the_torch_engines_bits(tmp_path: Path) -> None:
    model = checkpoint_model("qwen3")
    torch_backend = backend_of(model, tmp_path / "model")
    tokens = random_tokens(model, 1, 21)
    options = (
        {"target_modules": ALL, "modules_to_save": ["q_norm"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["q_norm", "k_norm"]},
    )
    adapters = [_read(model, torch_backend, tmp_path / str(i), settings) for i, settings in enumerate(options)]
    theirs = served_logits(torch_backend, [None, *adapters], tokens)
    served = served_logits(jax_backend(tmp_path / "model"), [None, *adapters], tokens)
    for one, other in zip(served, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.abs(served[1] - served[0]).max() > 1e-2
