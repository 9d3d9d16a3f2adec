"""Mixtures of experts through a whole engine: greedy text equals transformers', whatever memory is left to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.engine.config import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.engine import Engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import GenerateRequest, SamplingParams
from tests.engine.checkpoints import save, tiny_model
from tests.engine.driving import run, tokens_of
from tests.engine.logits_check import TOLERANCE, steady_prompts
from tests.seeds import rng

NUM_NEW = 12
#: Room for few sequences at a time, in chunks that divide nothing. Whether a guess is right depends on random weights.
TIGHT = EngineConfig(
    num_kv_blocks=12,
    block_size=16,
    lora_pool_rows=8,
    max_num_batched_tokens=13,
    max_num_seqs=3,
    target_step_ms=0,
    speculative_decoding="off",
)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss"])
def test_greedy_text_through_chunks_cached_prefixes_and_preemption(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    checkpoint = load_checkpoint(save(model, tmp_path / "model"))
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), TIGHT)
    engine = Engine(backend, TIGHT)
    generator = rng()
    (prefix,) = steady_prompts(model, generator, (37,))
    prompts = steady_prompts(model, generator, (1, 9, 30, 12, 1), prefix.tolist())
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{index}", "t", tuple(prompt.tolist()), sampling), None)
    chunks = run(engine)
    with torch.no_grad():
        for index, prompt in enumerate(prompts):
            found = torch.tensor(tokens_of(chunks[f"r{index}"]))
            logits = model(torch.cat([torch.tensor(prompt), found])[None]).logits[0, len(prompt) - 1 : -1]
            behind = logits.max(-1).values - logits[torch.arange(NUM_NEW), found]
            assert behind.max() <= TOLERANCE, "a token is transformers' own, or as good within the tolerance"
    assert engine.stats().num_cached_tokens, "no prefix was shared"
    backend.close()
