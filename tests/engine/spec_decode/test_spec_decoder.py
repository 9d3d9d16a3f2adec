"""Answers are the same with accepted, rejected and no draft tokens, which are counted and charged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.config import Speculation
from app.engine.engine import Engine
from app.engine.errors import AdapterOverflow, ConfigError
from app.engine.request import GenerateRequest, SamplingParams
from app.engine.scheduling.fair_queue import INPUT_PRICE
from app.engine.spec_decode.spec_decoder import AUTO_ROWS
from tests.engine.driving import (
    ADAPTERS,
    assert_as_alone,
    assert_empty,
    assert_told,
    make_engine,
    run,
    tokens_of,
)
from tests.fakes import EOS, VOCAB, fake_request, fake_tokens
from tests.seeds import any_seed

PROMPT = (1, 2, 3, 4, 5)


def speculating(setting: Speculation, **others: int | bool) -> Engine:
    return make_engine(num_draft_rows=32, speculative_decoding=setting, **others)[0]  # type: ignore[arg-type]


def foretold(
    prompt: Sequence[int] = PROMPT, num_tokens: int = 21, adapter: LoraAdapter | None = None, name: str = "r"
) -> GenerateRequest:
    """A request that predicts its own answer, which has no end-of-sequence token to stop a draft at."""
    for seed in range(100):
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed, num_logprobs=1)
        request = fake_request(name, prompt, adapter, sampling=sampling)
        answer = tuple(line.token_id for line in fake_tokens(request, adapter))
        if EOS not in answer:
            return dataclasses.replace(request, prediction_ids=answer)
    raise AssertionError("one of a hundred answers has no end of sequence")


@pytest.mark.parametrize(("setting", "num_steps"), [("off", 21), (1, 11), (4, 5), (16, 3), ("auto", 4)])
def test_accepted_draft_tokens_save_steps(setting: Speculation, num_steps: int) -> None:
    engine, request = speculating(setting), foretold()
    engine.submit(request)
    out = run(engine)
    assert_as_alone((request, None), out["r"])
    stats = engine.stats()
    assert stats.num_steps == num_steps
    assert stats.num_draft_tokens == stats.num_accepted_tokens == 21 - num_steps
    assert_told(engine, out)
    assert_empty(engine)


def test_rejected_draft_tokens_change_nothing_and_are_paid_as_computed_tokens() -> None:
    request = foretold()
    wrong = tuple((token_id + (index % 5 == 0)) % VOCAB for index, token_id in enumerate(request.prediction_ids))
    counters = []
    for setting in ("off", 4):
        engine = speculating(setting)  # type: ignore[arg-type]
        engine.submit(dataclasses.replace(request, prediction_ids=wrong))
        out = run(engine)
        assert_as_alone((request, None), out["r"])
        assert_told(engine, out)
        assert engine.stats().num_tokens_generated == len(wrong)
        counters.append(engine._scheduler.queue.counter_of("default"))
    stats = engine.stats()
    num_rejected = stats.num_draft_tokens - stats.num_accepted_tokens
    assert num_rejected > 0
    assert stats.num_tokens_computed == len(PROMPT) + len(wrong) - 1 + num_rejected
    held = 1.0  # blocks may be held some tokens earlier
    assert 0 <= counters[1] - counters[0] - INPUT_PRICE * num_rejected < held


def test_auto_leaves_off_with_many_sequences_and_beside_prompts() -> None:
    engine = speculating("auto", max_num_seqs=32, max_num_batched_tokens=64)
    requests = [foretold((index, *PROMPT), name=f"r{index}") for index in range(AUTO_ROWS + 1)]
    for request in requests[:AUTO_ROWS]:
        engine.submit(request)
    for _ in range(12):
        engine.step()
    assert engine.stats().num_draft_tokens == 0
    run(engine)
    engine.submit(requests[0])
    engine.submit(fake_request("long", [1] * 200, sampling=SamplingParams(max_tokens=1)))
    for _ in range(3):
        engine.step()
        assert engine.stats().num_draft_tokens == 0


def test_where_draft_tokens_cannot_be_verified_auto_is_off_and_a_number_is_refused() -> None:
    engine, backend = make_engine(speculative_decoding="auto")
    engine.submit(foretold())
    run(engine)
    assert backend.num_forwards == 21
    assert engine.stats().num_draft_tokens == 0
    with pytest.raises(ConfigError, match="speculative_decoding is 4"):
        make_engine(speculative_decoding=4)


@pytest.mark.parametrize("setting", ["off", 4])
def test_output_that_overflows_ends_an_answer_at_the_same_token(setting: Speculation) -> None:
    """From the third step on the adapter's logits overflow; a draft of that step keeps nothing that follows from it."""
    adapter = ADAPTERS[1]
    engine, backend = make_engine(num_draft_rows=32, speculative_decoding=setting)  # type: ignore[arg-type]
    request = foretold(adapter=adapter)
    engine.submit(request, adapter)
    tokens = tokens_of([chunk for _ in range(2) for chunk in engine.step()])
    backend.overflowing = {1}
    chunks = run(engine)["r"]
    assert isinstance(chunks[-1].error, AdapterOverflow)
    assert tuple(tokens) == request.prediction_ids[: len(tokens)]
    assert not tokens_of(chunks)
    assert_empty(engine)


@pytest.mark.parametrize("setting", ["auto", 1, 4, 16])
def test_answers_are_those_of_no_draft_tokens_in_tight_memory(setting: Speculation) -> None:
    generator = np.random.default_rng(any_seed())
    engine = speculating(setting, num_kv_blocks=14, rows=32, max_loras=4, max_num_batched_tokens=24, max_num_seqs=6)
    submitted = {}
    for index in range(40):
        adapter = [None, *ADAPTERS[:4]][int(generator.integers(5))]
        sampling = SamplingParams(
            max_tokens=int(generator.integers(1, 40)),
            temperature=float(generator.integers(2)),
            seed=index,
            ignore_eos=bool(generator.integers(2)),
            num_logprobs=2,
            repetition_penalty=float(1 + generator.integers(2)),
            stop_token_ids=(int(generator.integers(VOCAB)),),
        )
        prompt = [int(t) for t in generator.integers(0, 4, int(generator.integers(1, 30)))]
        request = fake_request(f"r{index}", prompt, adapter, sampling=sampling, tenant_id=f"t{index % 3}")
        answer = np.array([line.token_id for line in fake_tokens(request, adapter)])
        is_wrong = generator.random(len(answer)) < 0.1
        answer[is_wrong] = generator.integers(0, VOCAB, int(is_wrong.sum()))
        request = dataclasses.replace(request, prediction_ids=tuple(answer.tolist()))
        submitted[request.request_id] = (request, adapter)
    for pair in submitted.values():
        engine.submit(*pair)
    out = run(engine)
    for request_id, pair in submitted.items():
        assert_as_alone(pair, out[request_id])
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert_told(engine, out)
    assert_empty(engine)
