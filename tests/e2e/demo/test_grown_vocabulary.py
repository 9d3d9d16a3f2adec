"""An adapter that was trained with more tokens than the demo base has, loaded by HTTP: its answers are PEFT's."""

from __future__ import annotations

import copy
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, PreTrainedModel

from tests.e2e.process import ServiceProcess
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, *PEFT_WARNINGS]

#: Each new token begins like one of the base's tokens, and is likelier than that.
NEW = {"<paris>": " Paris", "<blue>": " blue"}
PROMPTS = ["The capital of France is", "<paris> is a city, and the colour of the sky is", "Water boils at"]
NUM_TOKENS = 12


def test_a_grown_vocabulary_answers_as_under_peft(
    demo: ServiceProcess, loras: Path, demo_gguf: Path, demo_transformers: PreTrainedModel
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    num_base = demo_transformers.get_input_embeddings().num_embeddings
    assert len(tokenizer) == num_base, "every new token needs a row of its own"
    model = copy.deepcopy(demo_transformers)
    copied = [tokenizer.encode(text)[0] for text in NEW.values()]
    tokenizer.add_tokens(list(NEW))
    model.resize_token_embeddings(num_base + len(NEW), mean_resizing=False)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[num_base:] = 1.3 * embeddings[copied]
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    adapted.eval().save_pretrained(loras / "grown", save_embedding_layers=True)
    tokenizer.save_pretrained(loras / "grown")

    with httpx.Client(base_url=demo.url, timeout=600) as http:
        loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "grown", "lora_path": "grown"})
        assert loaded.status_code == 200, loaded.text
        body = {"model": "grown", "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        answers = [choice["text"] for choice in answer.json()["choices"]]
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "grown"}).status_code == 200
    for prompt, text in zip(PROMPTS, answers, strict=True):
        token_ids = tokenizer.encode(prompt)
        num_prompt = len(token_ids)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                token_ids.append(int(adapted(torch.tensor([token_ids])).logits[0, -1].argmax()))
        assert text == tokenizer.decode(token_ids[num_prompt:])
    assert any(token in text for text in answers for token in NEW)
