"""Adapters that were trained with more tokens than the base's tokenizer has: text in, text out, as under PEFT."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken
from transformers import AutoTokenizer

from app.engine.api import LLM, Generation
from app.engine.config import CpuConfig, EngineConfig
from app.engine.errors import AdapterMismatch
from app.engine.request import SamplingParams
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.adapters.test_adapter_tokenizer import fast
from tests.engine.checkpoints import save, tiny_model

pytestmark = PEFT_WARNINGS

#: The tokenizer of `fast` has 260 tokens, and the model more rows, like most published ones.
NUM_ROWS = 288
TEXTS = ["a<call>b", "<end><call> x", "no tokens of its own"]
CONFIG = EngineConfig(cpu=CpuConfig(num_threads=1), num_kv_blocks=64, lora_pool_rows=64, max_loras=8)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, num_logprobs=5, prompt_logprobs=0)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and its folder."""
    model = tiny_model("llama", vocab_size=NUM_ROWS, tie_word_embeddings=request.param)
    folder = save(model, tmp_path_factory.mktemp("base"))
    fast().save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def llm(base: tuple[Any, Path]) -> Iterator[LLM]:
    with LLM(base[1], CONFIG) as made:
        yield made


def trained(model: Any, folder: Path, *tokens: str | AddedToken, **options: Any) -> Path:
    """PEFT's folder of an adapter with random numbers, and its tokenizer with more tokens."""
    tokenizer = fast()
    tokenizer.add_tokens(list(tokens))
    settings = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"]} | options
    peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.15)
    peft_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def under_peft(model: Any, folder: Path, text: str) -> tuple[list[int], list[float], str]:
    """Prompt and greedy answer as token ids, the log-probability of each but the first, and the answer's text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    token_ids = tokenizer(text)["input_ids"]
    num_prompt = len(token_ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            token_ids.append(int(adapted(torch.tensor([token_ids])).logits[0, -1].argmax()))
        found = adapted(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    logprobs = [float(found[at, token]) for at, token in enumerate(token_ids[1:])]
    return token_ids, logprobs, tokenizer.decode(token_ids[num_prompt:], skip_special_tokens=True)


def check(model: Any, folder: Path, text: str, answer: Generation) -> None:
    token_ids, logprobs, theirs = under_peft(model, folder, text)
    num_new = len(answer.token_ids)
    assert list(answer.token_ids) == token_ids[-num_new:]
    np.testing.assert_allclose([item.logprob for item in answer.logprobs], logprobs[-num_new:], rtol=0, atol=1e-4)
    assert answer.text == theirs


def test_answers_are_pefts_alone_and_beside_others(tmp_path: Path, base: tuple[Any, Path], llm: LLM) -> None:
    model, _ = base
    end = AddedToken("<end>", special=True)
    rows = {"trainable_token_indices": [260, 261]}
    folders = [
        trained(model, tmp_path / "rows", "<call>", end, **rows),
        trained(model, tmp_path / "plain", "<call>", end),
        trained(model, tmp_path / "other", end, "<call>", "x", modules_to_save=["embed_tokens", "lm_head"]),
        trained(model, tmp_path / "none"),
    ]
    pairs = [(text, folder) for text in TEXTS for folder in folders]
    answers = llm.generate([text for text, _ in pairs], [folder for _, folder in pairs], GREEDY)
    for (text, folder), answer in zip(pairs, answers, strict=True):
        check(model, folder, text, answer)
        (alone,) = llm.generate(text, folder, GREEDY)
        assert (alone.token_ids, alone.logprobs) == (answer.token_ids, answer.logprobs)
    before = llm.generate(TEXTS, None, GREEDY)
    mixed = llm.generate(TEXTS + TEXTS, [None] * 3 + [folders[0]] * 3, GREEDY)
    assert [(one.token_ids, one.logprobs) for one in mixed[:3]] == [(one.token_ids, one.logprobs) for one in before]
    assert [one.token_ids for one in mixed[3:]] != [one.token_ids for one in before]


def test_an_answer_has_the_tokens_of_its_adapter(tmp_path: Path, base: tuple[Any, Path], llm: LLM) -> None:
    model, _ = base
    folder = trained(model, tmp_path / "it", "<call>", AddedToken("<end>", special=True))
    sampling = SamplingParams(max_tokens=2, logit_bias=((260, 100.0),), ignore_eos=True)
    own, plain = llm.generate(["a", "a"], [folder, None], sampling)
    assert (own.text, plain.text) == ("<call><call>", "")
    assert "".join(llm.stream("a", folder, sampling)) == "<call><call>"
    assert llm._tokenizer_of(folder).encode("<call>") == [260]
    assert len(llm.tokenizer.encode("<call>")) == 6
    llm.remove_adapter(folder)


def test_tokens_beyond_the_bases_rows_are_refused(tmp_path: Path, base: tuple[Any, Path], llm: LLM) -> None:
    folder = trained(base[0], tmp_path / "it", *(f"<{index}>" for index in range(NUM_ROWS - 260 + 1)))
    with pytest.raises(AdapterMismatch, match=f"'<28>' as id {NUM_ROWS}, and the embeddings of .* {NUM_ROWS} rows"):
        llm.load_adapter(folder)
