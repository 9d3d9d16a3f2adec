"""Activated LoRA: the base's tokens and memory before the invocation, PEFT's answers from it on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets

from app.engine.adapters.card import AdapterRef, invocation_start
from app.engine.adapters.combining.combination import Combination, CombinationMethod, CombinationPart
from app.engine.adapters.combining.combine import combine
from app.engine.adapters.features import FEATURES, MERGEABLE_FEATURES
from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.adapters.sandbox.packing import pack_adapter, unpack_adapter
from app.engine.api import LLM, Generation
from app.engine.config import EngineConfig
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge, CombinationError
from app.engine.request import SamplingParams
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.adapters.parity import save_random_adapter, tiny_model
from tests.engine.adapters.random_adapters import (
    peft_beyond,
    peft_config,
    peft_tensors,
    random_arrays,
    tiny_spec,
    write_peft,
)
from tests.engine.served import write_tokenizer

pytestmark = PEFT_WARNINGS

INVOCATION = (7, 8, 7)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, num_logprobs=0, ignore_eos=True)
#: Small blocks and chunks, so that blocks, chunks and invocations begin in different places.
CONFIG = EngineConfig(block_size=16, num_kv_blocks=64, lora_pool_rows=64, max_num_batched_tokens=24)


class Served:
    """A tiny model, an activated adapter on it and the same adapter without its invocation."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny_model("llama", max_position_embeddings=256)
        self.model.save_pretrained(folder / "base")
        write_tokenizer(folder / "base")
        self.activated, self.plain = folder / "activated", folder / "plain"
        settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ALL}
        config = LoraConfig(**settings, alora_invocation_tokens=list(INVOCATION))
        save_random_adapter(self.model, self.activated, config)
        self.llm = LLM(folder / "base", CONFIG)
        stored = read_raw_adapter(self.activated, self.llm.spec)
        write_peft_folder(self.plain, replace(stored, invocation_tokens=()))

    def answer(self, prompt: list[int], adapter: Path | None) -> Generation:
        (answer,) = self.llm.generate([prompt], adapter, GREEDY)
        return answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.manual_seed(23)
    it = Served(tmp_path_factory.mktemp("served"))
    yield it
    it.llm.close()


def _words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(9, 96, count).tolist()


CALL = list(INVOCATION)
PROMPTS = {
    "at the end": _words(40, 1) + CALL,
    "in the middle": _words(19, 2) + CALL + _words(30, 3),
    "at the beginning": CALL + _words(33, 4),
    "twice: the last counts": _words(9, 5) + CALL + _words(20, 6) + CALL + _words(5, 7),
    "overlapping itself": [*_words(15, 8), 7, 8, *CALL, *_words(3, 9)],
    "at a block's edge": _words(32, 10) + CALL + _words(2, 11),
    "cut off": _words(30, 12) + CALL[:2],
    "not there": _words(35, 13),
    "nothing but it": CALL,
}


def _pefts(model: Any, folder: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens of `generate`, with their log-probabilities."""
    adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    try:
        with torch.no_grad():
            out = adapted.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=GREEDY.max_tokens,
                min_new_tokens=GREEDY.max_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
    finally:
        adapted.unload()
    logprobs = [torch.log_softmax(logits[0], -1).max().item() for logits in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), logprobs


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_answers_are_pefts(served: Served, prompt: list[int]) -> None:
    answer = served.answer(prompt, served.activated)
    tokens, logprobs = _pefts(served.model, served.activated, prompt)
    assert list(answer.token_ids) == tokens
    np.testing.assert_allclose([line.logprob for line in answer.logprobs], logprobs, rtol=0, atol=2e-5)
    has_call = any(prompt[at : at + 3] == CALL for at in range(len(prompt)))
    assert (answer.logprobs == served.answer(prompt, None).logprobs) == (not has_call)


def test_all_in_one_batch_have_the_bits_that_they_have_alone(served: Served) -> None:
    prompts = [prompt for prompt in PROMPTS.values() for _ in range(3)]
    adapters = [served.activated, None, served.plain] * len(PROMPTS)
    together = served.llm.generate(prompts, adapters, GREEDY)
    for prompt, adapter, answer in zip(prompts, adapters, together, strict=True):
        alone = served.answer(prompt, adapter)
        assert (alone.token_ids, alone.logprobs) == (answer.token_ids, answer.logprobs)
    assert len({answer.token_ids for answer in together}) > len(PROMPTS)


def test_a_prompt_without_the_invocation_takes_no_rows(served: Served, tmp_path: Path) -> None:
    settings = {"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8, "target_modules": ALL}
    save_random_adapter(served.model, tmp_path, LoraConfig(**settings, alora_invocation_tokens=list(INVOCATION)))
    engine, adapter = served.llm._engine, served.llm.load_adapter(tmp_path)
    before = engine.stats()
    answer = served.answer(PROMPTS["cut off"], tmp_path)
    assert answer.logprobs == served.answer(PROMPTS["cut off"], None).logprobs
    after = engine.stats()
    assert (after.residents, after.num_adapter_writes) == (before.residents, before.num_adapter_writes)
    served.answer(PROMPTS["at the end"], tmp_path)
    assert adapter.card.digest in {resident.digest for resident in engine.stats().residents}


def test_an_invocation_that_is_generated_activates_nothing(served: Served) -> None:
    """As in PEFT, whose `generate` searches the prompt once; and so does whoever continues from another's tokens."""
    prompt = PROMPTS["not there"]
    base = served.answer(prompt, None)
    engine = served.llm._engine
    adapter = served.llm.load_adapter(served.activated)
    ref = AdapterRef("it", adapter.card.digest, "local")
    request, _ = served.llm._request(prompt, None, replace(GREEDY, max_tokens=9))
    resumed = replace(request, request_id="resumed", adapter=ref, resume_token_ids=INVOCATION)
    without = replace(request, request_id="without", resume_token_ids=INVOCATION)
    answers: dict[str, list[int]] = {"resumed": [], "without": []}
    engine.submit(resumed, adapter)
    engine.submit(without, None)
    while engine.has_work:
        for chunk in engine.step():
            answers[chunk.request_id] += chunk.token_ids
    assert answers["resumed"] == answers["without"]
    assert len(answers["resumed"]) == 6
    assert base.logprobs == served.answer(prompt, served.activated).logprobs


def test_what_the_base_has_cached_is_the_activated_adapters(served: Served) -> None:
    conversation = _words(85, 20)
    prompt = conversation + CALL + _words(4, 21)
    cold = served.answer(prompt, served.plain)
    assert cold.usage.cached_tokens == 0
    served.answer(conversation, None)
    answer = served.answer(prompt, served.activated)
    assert answer.usage.cached_tokens == 80  # whole blocks before the invocation
    assert served.answer(prompt, served.plain).usage.cached_tokens == 80  # its own, of the first time
    again = served.answer(prompt + _words(20, 22), served.activated)
    assert again.usage.cached_tokens == 80, "the block with the invocation was not full"
    third = served.answer(prompt + _words(20, 22) + _words(9, 23), served.activated)
    assert third.usage.cached_tokens == 112, "its own blocks are found again"
    longer = prompt + _words(20, 22) + CALL + _words(3, 24)
    assert served.answer(longer, served.activated).usage.cached_tokens == 80, "with a later invocation it is the base's"


def test_what_an_activated_adapter_computes_of_the_base_the_base_finds(served: Served) -> None:
    conversation = _words(70, 30)
    served.answer(conversation + CALL, served.activated)
    assert served.answer([*conversation, 9], None).usage.cached_tokens == 64
    assert served.answer(conversation + CALL, served.plain).usage.cached_tokens == 0


def test_the_place_is_pefts() -> None:
    generator = np.random.default_rng(5)
    for _ in range(300):
        invocation = generator.integers(0, 3, int(generator.integers(1, 4))).tolist()
        prompt = generator.integers(0, 3, int(generator.integers(1, 12))).astype(np.int32)
        config = {"it": LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=invocation)}
        (offset,) = calculate_alora_offsets(config, "it", torch.tensor(prompt[None].astype(np.int64)))
        assert invocation_start(prompt, invocation) == (None if offset is None else len(prompt) - offset)


def test_the_invocation_is_part_of_what_an_adapter_is(served: Served, tmp_path: Path) -> None:
    spec = served.llm.spec
    stored = read_raw_adapter(served.activated, spec)
    write_card(tmp_path / "it.lora.arrow", ArrowCard("it", stored, {}))
    write_peft_folder(tmp_path / "again", read_card(tmp_path / "it.lora.arrow").raw)
    sources = (served.activated, tmp_path / "it.lora.arrow", tmp_path / "again")
    cards = [read_adapter(source, spec, supported_features=FEATURES).card for source in sources]
    assert {card.invocation_tokens for card in cards} == {INVOCATION}
    plain = read_adapter(served.plain, spec).card
    assert len({card.digest for card in cards}) == 1
    assert plain.digest != cards[0].digest
    packed = pack_adapter(read_adapter(served.activated, spec, supported_features=FEATURES))
    assert unpack_adapter(packed.header, packed.arrays).card == cards[0]


def test_what_it_cannot_be_combined_with_is_refused_by_name(served: Served) -> None:
    spec = served.llm.spec
    with pytest.raises(AdapterMismatch, match="activated LoRA"):
        read_adapter(served.activated, spec, supported_features=frozenset())
    adapter = read_adapter(served.activated, spec, supported_features=FEATURES)
    assert not adapter.features & MERGEABLE_FEATURES
    part = CombinationPart(AdapterRef("it", adapter.card.digest, "t"), 1.0)
    with pytest.raises(CombinationError, match="'it' has activated LoRA"):
        combine(Combination((part, part), CombinationMethod("cat")), [adapter, adapter], spec)


@pytest.mark.parametrize("feature", ["dora", "embedding", "saved", "rows"])
def test_what_would_change_tokens_before_the_invocation_is_refused(tmp_path: Path, feature: str) -> None:
    spec = tiny_spec()
    config, tensors = peft_beyond(spec, features=[feature])
    folder = write_peft(tmp_path, config | {"alora_invocation_tokens": [5]}, tensors)
    with pytest.raises(AdapterFormatError, match=r"activated LoRA|alora_invocation_tokens"):
        read_adapter(folder, spec, supported_features=FEATURES)


def test_an_invocation_that_the_base_cannot_be_told_is_refused(tmp_path: Path) -> None:
    spec = tiny_spec()
    config = peft_config(2, ["q_proj"], alora_invocation_tokens=[spec.vocab_size])
    folder = write_peft(tmp_path, config, peft_tensors(random_arrays(spec, 2, ["q_proj"])))
    with pytest.raises(AdapterMismatch, match="invocation token 64"):
        read_adapter(folder, spec, supported_features=FEATURES)


def test_an_invocation_of_many_tokens_is_refused(tmp_path: Path) -> None:
    spec = tiny_spec()
    tensors = peft_tensors(random_arrays(spec, 2, ["q_proj"]))
    for number in (64, 65):
        config = peft_config(2, ["q_proj"], alora_invocation_tokens=[1] * number)
        folder = write_peft(tmp_path / str(number), config, tensors)
        if number == 64:
            assert len(read_adapter(folder, spec, supported_features=FEATURES).card.invocation_tokens) == 64
        else:
            with pytest.raises(AdapterTooLarge, match="65 invocation tokens; at most 64"):
                read_adapter(folder, spec, supported_features=FEATURES)
