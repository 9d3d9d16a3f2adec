"""Log-probabilities of prompts: with adapters, in any company, in chunks, from the cache and after preemption."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.engine import Engine
from app.engine.errors import InvalidRequest
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import GenerateRequest, SamplingParams
from tests.engine.adapters.parity import save_random_adapter, tiny_model
from tests.engine.driving import assert_as_alone, assert_empty, make_engine, run
from tests.engine.logits_check import assert_logprobs
from tests.fakes import fake_adapter, fake_request
from tests.seeds import rng


def assert_together_as_alone(engine: Engine, requests: Sequence[GenerateRequest]) -> None:
    """Run requests of the base together; each is answered as it is alone."""
    for request in requests:
        engine.submit(request)
    out = run(engine)
    for request in requests:
        assert_as_alone((request, None), out[request.request_id])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
def test_adapters_equal_peft_beside_the_base_in_chunks(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    checkpoint = load_checkpoint(tmp_path / "base")
    config = EngineConfig(num_kv_blocks=64, lora_pool_rows=64, max_loras=4, max_num_batched_tokens=24, max_num_seqs=6)
    engine = Engine(CpuBackend(checkpoint.spec, checkpoint.tensors(), config), config)
    judges: dict[str, Any] = {"base": model}
    adapters: dict[str, LoraAdapter | None] = {"base": None}
    for name, rank in (("small", 4), ("large", 16)):
        save_random_adapter(model, tmp_path / name, LoraConfig(r=rank, target_modules="all-linear"))
        adapters[name] = read_adapter(tmp_path / name, checkpoint.spec)
        judges[name] = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / name).eval()
    prompt = rng().integers(3, 96, 45)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=3, num_logprobs=0, ignore_eos=True)
    for attempt in range(2):
        for name, adapter in adapters.items():
            engine.submit(fake_request(f"{name} {attempt}", prompt.tolist(), adapter, sampling=sampling), adapter)
        out = run(engine)
        assert len(out) == len(adapters)
        for request_id, chunks in out.items():
            assert_logprobs(judges[request_id.split()[0]], prompt, chunks[0].prompt_logprobs)
            assert sum(len(chunk.token_ids) for chunk in chunks) == 3
    assert_empty(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_a_step_has_as_many_rows_of_logits_as_sequences_may_run(max_num_seqs: int) -> None:
    engine, backend = make_engine(max_num_batched_tokens=16, max_num_seqs=max_num_seqs)
    backend.keep_batches = True
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    requests = [fake_request(f"{i}", list(range(i, i + 20)), sampling=sampling) for i in range(3)]
    assert_together_as_alone(engine, requests)
    most = max(len(batch.sample_rows) for batch in backend.batches)
    assert most <= max_num_seqs
    assert max_num_seqs == 1 or most > 1


def test_a_cached_prompt_is_computed_from_its_first_token_that_needs_logits() -> None:
    engine, _ = make_engine()
    adapter = fake_adapter("a", 8)
    prompt = list(range(40))
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    cached = []
    for index, sampling in enumerate((plain, plain, scored, plain)):
        request = fake_request(f"{index}", prompt, adapter, sampling=sampling)
        engine.submit(request, adapter)
        chunks = run(engine)[f"{index}"]
        assert_as_alone((request, adapter), chunks)
        assert chunks[-1].usage is not None
        cached.append(chunks[-1].usage.cached_tokens)
    assert cached == [0, 32, 0, 32]


def test_a_prompt_that_was_preempted_is_scored_once() -> None:
    engine, _ = make_engine(num_kv_blocks=9, max_num_seqs=4, max_num_batched_tokens=8)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    requests = [fake_request(f"{i}", list(range(i, i + 26)), sampling=sampling) for i in range(4)]
    assert_together_as_alone(engine, requests)
    assert_empty(engine)


def test_without_log_probabilities_of_the_prompt_at_least_one_token_is_generated() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        engine.submit(fake_request("r", [1, 2], sampling=SamplingParams(max_tokens=0)))
