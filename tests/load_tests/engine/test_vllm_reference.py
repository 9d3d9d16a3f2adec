"""vLLM's place in the benchmark, held by a stand-in package: what it is asked, what is timed, how its end is told.

The worker itself runs, in a child process, against a small package named vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from load_tests.engine.vllm_reference import VllmDecoder, write_model
from tests.engine.checkpoints import save, tiny_model

#: Each step gives every request one token: its LoRA's number times 1,000, plus its prompt's last token plus the step.
PACKAGE = """
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, dtype, max_num_seqs, enable_lora=False, **settings):
        assert dtype == "float32" and not settings["enable_prefix_caching"]
        if "broken" in model:
            raise ValueError("no such model")
        print("a banner on standard output")
        self.enable_lora, self.running = enable_lora, []
        self.llm_engine = self

    def add_request(self, name, prompt, sampling, lora_request):
        assert bool(lora_request) <= self.enable_lora
        number = lora_request.lora_int_id if lora_request else 0
        first = 1000 * number + prompt["prompt_token_ids"][-1]
        self.running.append((name, first, sampling.max_tokens, []))

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        outputs = []
        for name, first, most, tokens in self.running:
            tokens.append(first + len(tokens))
            completion = SimpleNamespace(token_ids=tokens)
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=len(tokens) == most))
        self.running = [request for request in self.running if len(request[3]) < request[2]]
        return outputs
"""
LORA = """
class LoRARequest:
    def __init__(self, name, lora_int_id, path):
        assert lora_int_id > 0 and path.endswith(str(lora_int_id))
        self.lora_int_id = lora_int_id
"""


def write_stand_in(folder: Path) -> Path:
    """A Python that finds the stand-in."""
    (folder / "site/vllm/lora").mkdir(parents=True)
    (folder / "site/vllm/__init__.py").write_text(PACKAGE)
    (folder / "site/vllm/lora/__init__.py").write_text("")
    (folder / "site/vllm/lora/request.py").write_text(LORA)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder / "site"}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return write_stand_in(tmp_path)


@pytest.fixture
def decoder(python: Path, tmp_path: Path) -> Iterator[VllmDecoder]:
    folders = [tmp_path / "adapter-1", tmp_path / "adapter-2"]
    found = VllmDecoder(python, tmp_path / "model", folders, max_rank=8, max_streams=4, max_length=64, compiled=False)
    yield found
    found.close()


def test_prompts_and_adapters_arrive_in_their_order(decoder: VllmDecoder) -> None:
    decoded = decoder.decode([[1, 2], [7], [5, 9]], [None, 1, 0], 3)
    assert decoded.token_ids == ((2, 3, 4), (2007, 2008, 2009), (1009, 1010, 1011))
    assert len(decoded.step_s) == 2  # the first step is the prefill
    assert decoded.prefill_s > 0


def test_the_base_is_decoded_with_lora_off(decoder: VllmDecoder) -> None:
    assert decoder.decode([[4]], [None], 2).token_ids == ((4, 5),)
    assert decoder._base is not decoder._lora


def test_a_failed_start_is_told_with_its_reason(python: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"vLLM ended with status 1:(.|\n)*no such model"):
        VllmDecoder(python, tmp_path / "broken", [], max_rank=8, max_streams=1, max_length=8, compiled=True)


def test_the_written_model_is_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save(tiny_model("llama"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.quantization_config = {"quant_method": "gguf"}
    written = AutoModelForCausalLM.from_pretrained(write_model(model, tmp_path / "written")).eval()
    tokens = torch.tensor([[3, 14, 15, 9]])
    with torch.inference_mode():
        assert torch.equal(written(tokens).logits, model(tokens).logits)
    assert "quantization_config" not in written.config.to_dict()
