"""`engine.cpu.compute`: int8 and bfloat16 come near float32, cover what they say, and are base models of their own; so
is KV memory in bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from app.cli.preflight import product_form
from app.engine.adapters.adapter import LoraKey
from app.engine.api import LLM
from app.engine.config import Compute, CpuConfig, EngineConfig, WeightDtype, XlaConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.cpu.decoder import Weights
from app.engine.cpu.weights import PackedModules, WeightPacker, product_rows
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import load_checkpoint, open_model
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import expected_tensors
from app.engine.models.weight_stacks import Products
from app.engine.pools.block_pool import root_hash
from app.kernels.bf16_matmul import self_test as bf16_self_test
from app.kernels.bf16_matmul.cpu import Bf16Panels
from app.kernels.bf16_matmul.reference import to_bfloat16
from app.kernels.cast_bf16.reference import bfloat16_bits
from app.kernels.int8_matmul import self_test as int8_self_test
from app.kernels.int8_matmul.cpu import DotPanels
from app.kernels.int8_matmul.reference import GROUP, quantise_rows
from app.kernels.machine.thread_team import ThreadTeam
from tests.engine.adapters.parity import random_tokens
from tests.engine.adapters.random_adapters import random_adapter
from tests.engine.batch_invariance import dense_spec, grid_tensors, latent_spec, mixture_spec
from tests.engine.checkpoints import tiny_model
from tests.engine.cuda.grids import on_grids, put_on_grids
from tests.engine.encoders import save_adapter, save_encoder, tiny_encoder
from tests.engine.served import CONFIG, served_logits
from tests.seeds import rng

INT8, BF16 = (CONFIG.on(CpuConfig(compute=compute)) for compute in ("int8", "bfloat16"))


def _off_grid(spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    for name, shape in expected_tensors(spec).items():
        yield name, generator.standard_normal(shape).astype(np.float32)


def save_on_grids(folder: Path) -> Any:
    """A tiny Llama in that folder whose projections can be in 4 bits, the head's as well, and the model."""
    model: Any = put_on_grids(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.from_numpy(on_grids(model.lm_head.weight.numpy(), 4)))
    model.save_pretrained(folder)
    return model


def _rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def _round_input(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:  # noqa: ARG001
    """A linear module's input as the products in integers round it."""
    x = args[0].detach().float()
    rows = quantise_rows(x.reshape(-1, x.shape[-1]).numpy())
    rounded = (rows.levels * np.repeat(rows.scales, GROUP, axis=1))[:, : x.shape[-1]]
    return (torch.from_numpy(rounded.astype(np.float32)).reshape(x.shape),)


def _narrow_input(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:  # noqa: ARG001
    """A linear module's input as the products in bfloat16 round it."""
    return (torch.from_numpy(to_bfloat16(args[0].detach().float().numpy())),)


def _logits_with(model: Any, tokens: torch.Tensor, hook: Any) -> NDArray[np.float32]:
    """transformers' logits with the inputs of linear modules rounded."""
    handles = [m.register_forward_pre_hook(hook) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        logits: NDArray[np.float32] = model(tokens).logits.numpy()
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.nightly  # a minute of compilation
def test_logits_are_those_of_transformers_with_rounded_inputs_and_near_float32(tmp_path: Path) -> None:
    """The base's tightly; with adapters, whose own products are in float32, only near."""
    model = save_on_grids(tmp_path)
    checkpoint, tokens = load_checkpoint(tmp_path), random_tokens(model, 2, 37)
    adapters = [random_adapter(checkpoint.spec, rank, ["q_proj", "down_proj"], rank, size=0.3) for rank in (3, 16)]
    found: dict[Compute, list[NDArray[np.float32]]] = {}
    for compute in get_args(Compute):
        backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG.on(CpuConfig(compute=compute)))
        found[compute] = served_logits(backend, [None, *adapters], tokens)
        backend.close()
    rounded_models = {"int8": _logits_with(model, tokens, _round_input)}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(torch.from_numpy(to_bfloat16(module.weight.numpy())))
    rounded_models["bfloat16"] = _logits_with(model, tokens, _narrow_input)
    # A value beside the middle of two levels may go either way: about one of 10,000 does, and changes what follows it.
    for compute, expected in rounded_models.items():
        assert _rms(found[compute][0] - expected) < 0.2 * _rms(found[compute][0] - found["float32"][0]), compute
        for exact, rounded in zip(found["float32"], found[compute], strict=True):
            assert 1e-4 < _rms(rounded - exact) / _rms(exact) < 0.1, compute


@pytest.mark.nightly  # a minute of compilation
@pytest.mark.parametrize("spec", [dense_spec(), latent_spec()], ids=["dense", "latents"])
def test_kv_memory_in_bfloat16_has_float32s_numbers_rounded(spec: ModelSpec) -> None:
    """The first layer's in every bit; logits come near."""
    tokens = torch.from_numpy(rng().integers(3, 120, (1, 60)).astype(np.int32))
    memory, logits = [], []
    for cpu in (CpuConfig(), CpuConfig(kv_cache_dtype="bfloat16")):
        backend = CpuBackend(spec, grid_tensors(spec, 3), CONFIG.on(cpu))
        logits.append(served_logits(backend, [None], tokens)[0])
        memory.append((backend._k_memory, backend._v_memory))
        backend.close()
    for wide, narrow in zip(*memory, strict=True):
        assert narrow.nbytes * 2 == wide.nbytes
        assert wide.size == 0 or wide[0].any()
        np.testing.assert_array_equal(narrow[0], bfloat16_bits(wide[0]))
    assert 1e-5 < _rms(logits[1] - logits[0]) / _rms(logits[0]) < 0.05


@pytest.mark.nightly  # half a minute of compilation
# PEFT 0.21 still asks transformers 5.23 for a name it has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_embeddings_keep_their_bits_in_a_batch_and_come_near_float32(tmp_path: Path) -> None:
    """Of an encoder; alone, and beside others in two orders."""
    model = put_on_grids(tiny_encoder("bert"))
    folder = save_encoder(model, tmp_path / "model")
    settings = {"r": 3, "target_modules": ["query", "output.dense"]}
    paths = [None, save_adapter(model, tmp_path / "lora", **settings)]
    paths.append(save_adapter(model, tmp_path / "dora", use_dora=True, **settings))
    generator = rng()
    texts = [generator.integers(4, 99, n).tolist() for n in (1, 2, 17, 31, 33, 64, 100, 5, 5)]
    adapters = [paths[index % len(paths)] for index in range(len(texts))]
    found = {}
    for compute in get_args(Compute):
        with LLM(
            folder, EngineConfig(cpu=CpuConfig(compute=compute, num_threads=2), max_num_batched_tokens=160)
        ) as llm:
            together = found[compute] = llm.embed(texts, adapters)
            backwards = llm.embed(texts[::-1], adapters[::-1])[::-1]
            for text, path, vector, other in zip(texts, adapters, together, backwards, strict=True):
                np.testing.assert_array_equal(vector, other)
                np.testing.assert_array_equal(vector, llm.embed(text, path)[0])
    for compute in ("int8", "bfloat16"):
        for exact, rounded in zip(found["float32"], found[compute], strict=True):
            assert 1e-4 < np.abs(rounded - exact).max() < 0.1, compute


def _packed(
    spec: ModelSpec, weight_dtype: WeightDtype, tensors: Iterator[tuple[str, np.ndarray]], compute: Compute = "int8"
) -> Weights:
    """The decoder's weights for rounded products."""
    products = Products(compute, product_rows(spec, 8, 8))
    with closing(ThreadTeam(1)) as team:
        return WeightPacker(spec, 64, weight_dtype, team, products).pack_all(tensors)


@pytest.mark.parametrize(("compute", "kind"), [("int8", DotPanels), ("bfloat16", Bf16Panels)])
def test_routers_stay_in_float32(compute: Compute, kind: type) -> None:
    spec = mixture_spec()
    weights = _packed(spec, "auto", grid_tensors(spec, 1), compute)
    assert weights.moe is not None
    rounded = {name for name in weights.moe._fields if isinstance(getattr(weights.moe, name), kind)}
    assert rounded == {"gate_up", "down", "shared_gate_up", "shared_down"}
    assert all(isinstance(stack, kind) for stack in (weights.qkv, weights.o, weights.head))


def test_weights_in_bfloat16_are_the_checkpoints_rounded() -> None:
    """As `PackedModules` reads them, for DoRA's norms above all; and on any grid or none."""
    spec = dense_spec()
    tensors = dict(_off_grid(spec))
    weights = _packed(spec, "auto", iter(tensors.items()), "bfloat16")
    key = LoraKey(1, "down_proj")
    panels = PackedModules(spec, weights).panels(key)  # [P, d_in, 16]
    columns = panels.swapaxes(1, 2).reshape(-1, panels.shape[1])[: spec.hidden_size]
    np.testing.assert_array_equal(columns, to_bfloat16(tensors["model.layers.1.mlp.down_proj.weight"]))
    with pytest.raises(ValidationError, match=r"engine\.cpu\.weight_dtype\s+is int8; set it to auto"):
        CpuConfig(compute="bfloat16", weight_dtype="int8")


def test_weights_that_8_bits_would_change_are_refused_unless_they_may_be_rounded() -> None:
    spec = dense_spec()
    with pytest.raises(ConfigError, match="none of the projections of 'fuzz' can be stored in 8 bits without loss"):
        _packed(spec, "auto", _off_grid(spec))
    assert isinstance(_packed(spec, "int8", _off_grid(spec)).qkv, DotPanels)
    with pytest.raises(ValidationError, match=r"engine\.cpu\.weight_dtype is\s+float32"):
        CpuConfig(compute="int8", weight_dtype="float32")


def test_a_machine_that_computes_no_form_exactly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert product_form(EngineConfig()) is None
    for config, self_test in ((INT8, int8_self_test), (BF16, bf16_self_test)):
        assert product_form(config) == self_test.active_form()
        monkeypatch.setattr(self_test, "active_form", lambda: None)
        assert product_form(EngineConfig()) is None
        with pytest.raises(ConfigError, match=rf"engine\.cpu\.compute is {config.compute}, but no form"):
            product_form(config)


def test_the_arithmetic_is_a_part_of_the_digest(tmp_path: Path) -> None:
    """So blocks of the KV memory have other keys, and adapters and tenants belong to one arithmetic."""
    tiny_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    plain = load_checkpoint(tmp_path)
    assert EngineConfig().arithmetic == EngineConfig(xla=XlaConfig()).arithmetic == "float32"
    assert open_model(str(tmp_path), plain.spec.name, EngineConfig().arithmetic).spec == plain.spec
    narrow_kv = [
        CONFIG.on(config.section(CpuConfig).model_copy(update={"kv_cache_dtype": "bfloat16"}))
        for config in (CONFIG, INT8, BF16)
    ]
    narrow = (*narrow_kv, CONFIG.on(CpuConfig(weight_dtype="int8")))
    rounded = [open_model(str(tmp_path), plain.spec.name, config.arithmetic).spec for config in (INT8, BF16, *narrow)]
    assert all(spec == dataclasses.replace(plain.spec, digest=spec.digest) for spec in rounded)
    assert len({root_hash(spec.digest, None, b"") for spec in (plain.spec, *rounded)}) == 7
