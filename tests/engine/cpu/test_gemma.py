"""Gemma through the whole engine: chunked prompts, shared prefixes and preemption change no greedy token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig

from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig, CudaConfig, EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.engine import Engine
from app.engine.errors import AdapterMismatch, CheckpointError
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import GenerateRequest, SamplingParams
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.adapters.parity import base_logits, peft_logits, random_tokens, save_random_adapter
from tests.engine.checkpoints import save, tiny_model
from tests.engine.served import backend_of, served_logits
from tests.seeds import rng

pytestmark = PEFT_WARNINGS


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_greedy_tokens_equal_transformers_in_chunks_with_prefixes_and_preemption(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    checkpoint = load_checkpoint(save(model, tmp_path))
    generator = rng()
    prefix = generator.integers(3, 99, 48).tolist()
    prompts = [[*prefix, *generator.integers(3, 99, 9 + 7 * index).tolist()] for index in range(6)]
    config = EngineConfig(
        cpu=CpuConfig(num_threads=2),
        num_kv_blocks=16,
        lora_pool_rows=64,
        max_num_batched_tokens=24,
        speculative_decoding="off",  # draft tokens end answers sooner where random weights repeat: no preemption
    )
    engine = Engine(CpuBackend(checkpoint.spec, checkpoint.tensors(), config), config)
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(str(index), "t", tuple(prompt), sampling), None)
    while engine.has_work:
        for chunk in engine.step():
            found.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    stats = engine.stats()
    engine.close()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *found[str(index)]]])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits[torch.arange(25), torch.tensor(found[str(index)])]
        assert (best - chosen).max() <= 2e-4, "a token is transformers' own, or as good within the tolerance"


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "embed_tokens"]], ids=str)
def test_an_adapter_gives_pefts_logits(family: str, targets: str | list[str], tmp_path: Path) -> None:
    model = tiny_model(family)
    backend = backend_of(model, tmp_path / "base")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=2, target_modules=targets)
    save_random_adapter(model, tmp_path / "it", config)
    adapter = read_adapter(tmp_path / "it", backend.spec, supported_features=FEATURES)
    tokens = random_tokens(model, length=40)
    base, served = served_logits(backend, [None, adapter], tokens)
    backend.close()
    expected = peft_logits(model, tmp_path / "it", tokens)
    assert np.abs(served - expected).max() <= 1e-4
    assert np.abs(base - base_logits(model, tokens)).max() <= 1e-4
    assert np.abs(served - base).max() > 1e-2


def test_adapters_that_train_norms_are_refused(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    spec = load_checkpoint(save(model, tmp_path / "base")).spec
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    save_random_adapter(model, tmp_path / "it", config)
    with pytest.raises(AdapterMismatch, match=r"which multiply by 1 \+ w, are not served"):
        read_adapter(tmp_path / "it", spec, supported_features=FEATURES)


def test_engines_without_gemmas_arithmetic_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "check_installed", lambda _: None)
    checkpoint = load_checkpoint(save(tiny_model("gemma2"), tmp_path))
    config = EngineConfig(num_kv_blocks=16).on(CudaConfig())
    with pytest.raises(CheckpointError, match=r"run with engine\.cpu only"):
        load_backend(checkpoint, config)
