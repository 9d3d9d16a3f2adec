"""Adapters that were trained with more tokens than the base's tokenizer has: text in, text out, as under PEFT."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from app.engine.adapters.formats.reading import read_adapter
from app.engine.api import LLM, Generation
from app.engine.config import CpuConfig, CudaConfig, EngineConfig, VllmConfig, XlaConfig
from app.engine.errors import AdapterFormatError, AdapterMismatch, InvalidRequest
from app.engine.factory import served_features
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import SamplingParams
from app.engine.structured_output.grammar_builder import client_lark_grammar
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.adapters.test_adapter_tokenizer import fast
from tests.engine.checkpoints import save, tiny_model

pytestmark = PEFT_WARNINGS

#: The tokenizer of `fast` has 260 tokens, and the model more rows, like most published ones.
NUM_ROWS = 288
TEXTS = ["a<call>b", "<end><call> x", "no tokens of its own"]
CONFIG = EngineConfig(cpu=CpuConfig(num_threads=1), num_kv_blocks=64, lora_pool_rows=64, max_loras=16)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, num_logprobs=20, prompt_logprobs=0)


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


def trained(model: Any, folder: Path, *tokens: str | AddedToken, num_rows: int = NUM_ROWS, **options: Any) -> Path:
    """PEFT's folder of an adapter with random numbers, and its tokenizer with more tokens.

    num_rows: of the embeddings, resized in training.
    """
    tokenizer = fast()
    tokenizer.add_tokens(list(tokens))
    model = resized(model, num_rows)
    settings = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"]} | options
    peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.15)
    # With the base's name, PEFT finds out by itself whether it was resized.
    peft_model.save_pretrained(folder, save_embedding_layers=num_rows != NUM_ROWS)
    tokenizer.save_pretrained(folder)
    return folder


def resized(model: Any, num_rows: int) -> Any:
    """A copy whose new rows are random, and so large that new tokens are among the most likely."""
    model = copy.deepcopy(model)
    if num_rows != NUM_ROWS:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            with torch.no_grad():
                end.weight[NUM_ROWS:].normal_(0, 3 * float(end.weight[:NUM_ROWS].std()))
    return model


def under_peft(model: Any, folder: Path, text: str, token_ids: Sequence[int]) -> tuple[torch.Tensor, str]:
    """Log-probabilities [n, N] of an answer's n tokens after a prompt, and the answer's text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(resized(model, rows_of(folder)), folder).eval()
    with torch.no_grad():
        found = adapted(torch.tensor([[*tokenizer(text)["input_ids"], *token_ids]])).logits[0].log_softmax(-1)
    return found[-1 - len(token_ids) : -1], tokenizer.decode(token_ids, skip_special_tokens=True)


def rows_of(folder: Path) -> int:
    """The rows of an adapter's embeddings, as far as its file has some."""
    tensors = load_file(folder / "adapter_model.safetensors")
    ends = [name for name in tensors if "layers." not in name and name.endswith("weight")]
    found = {tensors[name].shape[0] for name in ends if tensors[name].shape[1] == 40 and ".lora_" not in name}
    return found.pop() if found else NUM_ROWS


def check(model: Any, folder: Path, text: str, answer: Generation) -> None:
    logprobs, theirs = under_peft(model, folder, text, answer.token_ids)
    assert len(logprobs) == GREEDY.max_tokens
    assert answer.text == theirs
    for item, row in zip(answer.logprobs, logprobs, strict=True):
        assert row.max() - row[item.token_id] <= 2e-4, "a token is PEFT's own, or as good within the tolerance"
        ids = [token_id for token_id, _ in item.top]
        own = [item.logprob, *(logprob for _, logprob in item.top)]
        np.testing.assert_allclose(own, row[[item.token_id, *ids]].numpy(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(own[1:], row.topk(len(ids)).values.numpy(), rtol=0, atol=1e-4)


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


def new_tokens(num_rows: int) -> list[str]:
    """As many as make the tokenizer so large."""
    return [f"[{index}]" for index in range(num_rows - 260)]


#: Rows in training and further options; token 289 is [29].
RESIZED: dict[str, tuple[int, dict[str, Any]]] = {
    "grown": (290, {}),
    "grown more": (307, {}),
    "trained ends": (291, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "trained rows": (290, {"trainable_token_indices": [3, 288, 289]}),
    "tied, embedding LoRA": (290, {"target_modules": ["q_proj", "embed_tokens"]}),
    "untied, LoRA at both ends": (292, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "made smaller": (261, {}),
    "made smaller, trained ends": (262, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "untied, made smaller, lm_head LoRA": (270, {"target_modules": ["q_proj", "lm_head"]}),
}
LONG = ["a[0]b", "[28]a [29]", "[29][29]"]


def test_resized_vocabularies_answer_as_under_peft_in_one_batch(
    tmp_path: Path, base: tuple[Any, Path], llm: LLM
) -> None:
    model, _ = base
    is_tied = model.config.tie_word_embeddings
    folders = {}
    for name, (num_rows, options) in RESIZED.items():
        if "tied" not in name or ("untied" in name) != is_tied:
            folders[name] = trained(model, tmp_path / name, *new_tokens(num_rows), num_rows=num_rows, **options)
    pairs = [(text, folder) for text in LONG for folder in folders.values()]
    before = llm.generate(LONG, None, GREEDY)
    texts, paths = [text for text, _ in pairs], [folder for _, folder in pairs]
    answers = llm.generate(texts + LONG, [*paths, None, None, None], GREEDY)
    for (text, folder), answer in zip(pairs, answers[:-3], strict=True):
        check(model, folder, text, answer)
        (alone,) = llm.generate(text, folder, GREEDY)
        assert (alone.token_ids, alone.logprobs) == (answer.token_ids, answer.logprobs)
    named = {token_id for answer in answers[:-3] for item in answer.logprobs for token_id, _ in item.top}
    assert max(named) >= NUM_ROWS
    assert [(one.token_ids, one.logprobs) for one in answers[-3:]] == [(one.token_ids, one.logprobs) for one in before]
    for folder in folders.values():
        llm.remove_adapter(folder)


@pytest.mark.parametrize(("end", "missing"), [("embed_tokens", "lm_head"), ("lm_head", "embed_tokens")])
def test_rows_that_peft_did_not_save_are_missed(
    tmp_path: Path, base: tuple[Any, Path], llm: LLM, end: str, missing: str
) -> None:
    """Beside a LoRA at one end of an untied base PEFT saves that end alone."""
    if base[0].config.tie_word_embeddings:
        return  # one matrix
    folder = trained(base[0], tmp_path / "it", *new_tokens(290), num_rows=290, target_modules=["q_proj", end])
    with pytest.raises(AdapterMismatch, match=f"no row of {missing} for token 288"):
        llm.load_adapter(folder)


def test_a_token_beyond_the_bases_is_drawn_stopped_at_and_refused_for_others(
    tmp_path: Path, base: tuple[Any, Path], llm: LLM
) -> None:
    folder = trained(base[0], tmp_path / "it", *new_tokens(290), num_rows=290)
    drawn = SamplingParams(max_tokens=3, logit_bias=((289, 100.0),), ignore_eos=True, frequency_penalty=0.5)
    own, other = llm.generate(["a", "a"], [folder, None], [drawn, SamplingParams(max_tokens=3)])
    assert own.text == "[29]" * 3
    assert max(other.token_ids) < NUM_ROWS
    (stopped,) = llm.generate("a", folder, replace(drawn, stop_token_ids=(289,)))
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", (289,))
    grammar = client_lark_grammar('start: "a" "[29]"', "grammar")
    written, _ = llm.generate(["a", "a"], [folder, None], [SamplingParams(max_tokens=9, grammar=grammar)] * 2)
    assert written.text == "a[29]"
    for prompt, sampling in (([289], GREEDY), ("a", drawn), ("a", replace(GREEDY, stop_token_ids=(289,)))):
        with pytest.raises(InvalidRequest, match="289"):
            llm.generate([prompt], None, sampling)
    with pytest.raises(InvalidRequest, match="from 0 to 289"):
        llm.generate([[290]], folder, GREEDY)
    small = trained(base[0], tmp_path / "small", "[0]", num_rows=261)
    with pytest.raises(InvalidRequest, match="from 0 to 260"):
        llm.generate([[261]], small, GREEDY)
    (smallest,) = llm.generate("a", small, SamplingParams(max_tokens=9, temperature=2.0))
    assert max(smallest.token_ids) < 261


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"speculative_decoding": 4}, "num_accepted_tokens"),
        ({"num_kv_blocks": 11, "speculative_decoding": "off", "enable_prefix_caching": False}, "num_preemptions"),
        ({}, "num_cached_tokens"),
    ],
    ids=["drafts", "few blocks", "cached prefixes"],
)
def test_resized_vocabularies_keep_their_bits(
    tmp_path: Path, base: tuple[Any, Path], changes: dict[str, Any], least: str
) -> None:
    """Alone without drafts and cache, or in company with them: the two adapters have other rows for the same ids."""
    model, folder = base
    ends = {"modules_to_save": ["embed_tokens", "lm_head"]}
    paths: list[Path | None] = [
        trained(model, tmp_path / "one", *new_tokens(291), num_rows=291, **ends),
        trained(model, tmp_path / "other", *new_tokens(290), num_rows=290),
        trained(model, tmp_path / "small", num_rows=261),
        trained(model, tmp_path / "plain"),
        None,
    ]
    num_tokens = [291, 290, 261, NUM_ROWS, NUM_ROWS]
    text = "[28]a[29]" * 6
    drawn = SamplingParams(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True, num_logprobs=5, prompt_logprobs=2)
    again = replace(drawn, temperature=0.0, repetition_penalty=0.7, prompt_logprobs=None)
    params = [replace(one, seed=index) for index, one in enumerate([drawn, again] * len(paths))]
    params[:4] = [replace(one, logit_bias=((289, 8.0),)) for one in params[:4]]  # so that new tokens are drawn
    many = [path for path in paths for _ in range(2)]
    simple = CONFIG.model_copy(update={"speculative_decoding": "off", "enable_prefix_caching": False})
    with LLM(folder, simple) as llm:
        alone = [llm.generate(text, path, one)[0] for path, one in zip(many, params, strict=True)]
    with LLM(folder, CONFIG.model_copy(update=changes)) as llm:
        for _ in range(2):
            answers = llm.generate([text] * len(many), many, params)
            for one, answer in zip(alone, answers, strict=True):
                assert (answer.token_ids, answer.logprobs) == (one.token_ids, one.logprobs)
        assert getattr(llm.stats(), least) > 0
    largest = [max(answer.token_ids) for answer in alone]
    assert all(found < count for found, count in zip(largest, np.repeat(num_tokens, 2), strict=True))
    assert max(largest[:4]) >= NUM_ROWS


def test_tokens_beyond_the_bases_are_computed_in_int8(tmp_path: Path, base: tuple[Any, Path]) -> None:
    model, path = base
    folder = trained(model, tmp_path / "it", *new_tokens(290), num_rows=290)
    config = CONFIG.model_copy(update={"cpu": CpuConfig(num_threads=1, weight_dtype="int8", compute="int8")})
    drawn = replace(GREEDY, logit_bias=((289, 100.0),))
    with LLM(path, config) as llm:
        own, other, third = llm.generate(["[28]a[29]"] * 3, [folder, None, folder], [drawn, GREEDY, GREEDY])
        assert own.token_ids == (289,) * 6
        assert max(other.token_ids) < NUM_ROWS
        for found, adapter, sampling in ((own, folder, drawn), (other, None, GREEDY), (third, folder, GREEDY)):
            (alone,) = llm.generate("[28]a[29]", adapter, sampling)
            assert (alone.token_ids, alone.logprobs) == (found.token_ids, found.logprobs)


def test_capped_logits_of_new_tokens_are_pefts(tmp_path: Path) -> None:
    """Gemma 2 caps logits: c * tanh(l / c), those of new tokens, too."""
    model = tiny_model("gemma2 small caps", vocab_size=NUM_ROWS)
    path = save(model, tmp_path / "base")
    fast().save_pretrained(path)
    folder = trained(model, tmp_path / "it", *new_tokens(290), num_rows=290)
    with LLM(path, CONFIG) as llm:
        answers = llm.generate(LONG, folder, GREEDY)
        for text, answer in zip(LONG, answers, strict=True):
            check(model, folder, text, answer)
    named = {token_id for answer in answers for item in answer.logprobs for token_id, _ in item.top}
    assert max(named) >= NUM_ROWS


def test_an_activated_adapter_with_a_resized_vocabulary_is_refused(
    tmp_path: Path, base: tuple[Any, Path], llm: LLM
) -> None:
    """The base computes the prompt before its invocation, and has no row for a new token there."""
    kind = {"alora_invocation_tokens": [5, 6], "target_modules": ["q_proj"]}
    llm.load_adapter(trained(base[0], tmp_path / "activated", **kind))
    for num_rows in (290, 270):
        folder = trained(base[0], tmp_path / str(num_rows), *new_tokens(num_rows)[:20], num_rows=num_rows, **kind)
        with pytest.raises(AdapterFormatError, match=r"activated LoRA with .* a resized vocabulary is not served"):
            llm.load_adapter(folder)


@pytest.mark.parametrize(
    "device", [CudaConfig(), XlaConfig(), VllmConfig(python="python")], ids=lambda device: device.name
)
def test_other_engines_refuse_a_resized_vocabulary(tmp_path: Path, base: tuple[Any, Path], device: Any) -> None:
    folder = trained(base[0], tmp_path / "it", *new_tokens(290), num_rows=290)
    spec, features = load_checkpoint(base[1]).spec, served_features(EngineConfig().on(device))
    with pytest.raises(AdapterMismatch, match="a resized vocabulary"):
        read_adapter(folder, spec, supported_features=features)


def test_tokens_beyond_the_rows_are_refused(tmp_path: Path, base: tuple[Any, Path], llm: LLM) -> None:
    folder = trained(base[0], tmp_path / "it", *new_tokens(NUM_ROWS + 1))
    with pytest.raises(AdapterMismatch, match=rf"'\[28\]' as id {NUM_ROWS}, and the embeddings of .* {NUM_ROWS} rows"):
        llm.load_adapter(folder)
    folder = trained(base[0], tmp_path / "small", num_rows=250)
    with pytest.raises(AdapterMismatch, match="have 250 rows, but the base's tokenizer has 260 tokens"):
        llm.load_adapter(folder)
