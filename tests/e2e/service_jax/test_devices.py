"""A model divided over eight devices of this machine, by columns and by experts, behind a real service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import SamplingParams
from load_tests.random_adapters import write_random_adapter
from load_tests.service import free_port
from tests.e2e.process import serve_run, tiny_document
from tests.e2e.tiny import save_tiny_model

NUM_DEVICES, NUM_TOKENS = 8, 12
ADAPTERS = {"a": 4, "b": 12}
PROMPTS = ["the quick brown", "again and again"]
SIZES = {"num_kv_blocks": 64, "lora_pool_rows": 64, "max_num_seqs": 8, "max_model_len": 128}


def save_model(folder: Path, *, is_mixture: bool) -> None:
    """Eight heads and, if a mixture, eight experts, under the tiny model's tokenizer."""
    save_tiny_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sizes: dict[str, Any] = {
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128},
        **{"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "initializer_range": 0.3},
    }
    torch.manual_seed(1)
    if is_mixture:
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)


@pytest.mark.parametrize(("tensor", "experts"), [(8, 1), (2, 4), (1, 8)])
def test_answers_of_a_divided_model_are_those_of_the_cpu_engine(tmp_path: Path, tensor: int, experts: int) -> None:
    save_model(tmp_path / "model", is_mixture=experts > 1)
    spec = load_checkpoint(tmp_path / "model").spec
    for seed, (name, rank) in enumerate(ADAPTERS.items()):
        write_random_adapter(tmp_path / "loras" / name, spec, rank, seed)
    models = {"tiny": None} | {name: tmp_path / "loras" / name for name in ADAPTERS}
    asked = [(model, prompt) for model in models for prompt in PROMPTS]
    config = EngineConfig.model_validate({**SIZES, "cpu": {"weight_dtype": "float32", "num_threads": 1}})
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(tmp_path / "model", config) as llm:
        found = llm.generate([prompt for _, prompt in asked], [models[model] for model, _ in asked], sampling)
    expected = [answer.text for answer in found]
    assert len(set(expected)) == len(asked), "each adapter changes each answer"

    xla = {"tensor_parallel": tensor, "expert_parallel": experts, "skip_precompile": True}
    port = free_port()
    document = tiny_document(port, tmp_path, {**SIZES, "xla": xla}, preload=list(ADAPTERS))
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}"}
    process = serve_run(document, port, flags)
    try:
        process.wait_until_healthy(600)
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=600) as client:

            def ask(model: str, prompt: str) -> str:
                answer = client.completions.create(
                    model=model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
                )
                return answer.choices[0].text

            with ThreadPoolExecutor(len(asked)) as threads:
                assert list(threads.map(ask, *zip(*asked, strict=True))) == expected
    finally:
        process.stop()
