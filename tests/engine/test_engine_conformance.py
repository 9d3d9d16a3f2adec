"""What an `EngineThread` promises a replica, checked on each engine over one tiny model.

The fake worker stands for any engine behind the protocol; vLLM itself runs in nightly tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.errors import (
    AdapterMismatch,
    AdapterPoolFull,
    AdapterTooLarge,
    ContextOverflow,
    EngineFailure,
    InvalidRequest,
    QueueFull,
)
from app.engine.structured_output.grammar_builder import json_grammar, regex_grammar
from tests.engine.running import (
    MAX_LORA_RANK,
    MAX_LORAS,
    MAX_NUM_SEQS,
    MAX_QUEUED,
    Served,
    make_adapter,
    ref_of,
    write_model,
)

ENGINES = ["cpu", "fake", pytest.param("vllm", marks=[pytest.mark.nightly, pytest.mark.vllm])]
PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    served = Served(request.param, folder)
    yield served
    assert served.engine.stop(60)
    assert served.failures == []


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        served.settle()
        served.engine.pin_adapters(())
        assert all(resident.num_refs == 0 for resident in served.engine.stats().residents)


def test_an_answer_has_its_tokens_its_end_and_its_usage(served: Served) -> None:
    name = served.submit(PROMPT, max_tokens=5)
    assert len(served.tokens(name)) == 5
    last = served.last(name)
    assert (last.finish_reason, last.matched_stop) == ("length", None)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 5)
    assert served.chunks[name][0].usage is not None
    assert last.request_usage is not None
    assert last.request_usage.completion_tokens == 5


def test_a_stop_token_ends_the_answer_and_is_its_last(served: Served) -> None:
    tokens = served.answer(PROMPT)
    name = served.submit(PROMPT, stop_token_ids=(tokens[3],))
    first = tokens.index(tokens[3])
    assert served.tokens(name) == tokens[: first + 1]
    assert (served.last(name).finish_reason, served.last(name).matched_stop) == ("stop", tokens[3])


def test_the_bases_own_end_counts_unless_the_request_ignores_it(served: Served) -> None:
    (eos,) = served.spec.eos_token_ids
    bias = ((eos, 100.0),)
    assert served.answer(PROMPT, ignore_eos=False, logit_bias=bias) == [eos]
    assert served.answer(PROMPT, ignore_eos=True, max_tokens=3, logit_bias=bias) == [eos] * 3


def test_no_stop_token_comes_before_min_tokens(served: Served) -> None:
    first = served.answer(PROMPT)[0]
    name = served.submit(PROMPT, stop_token_ids=(first,), min_tokens=4)
    assert first not in served.tokens(name)[:4]


def test_requests_in_company_are_answered_as_alone(served: Served) -> None:
    adapters = [None, *(make_adapter(served.spec, seed, rank) for seed, rank in ((1, 4), (2, 16)))]
    prompts = [(*PROMPT, index) for index in range(4)]
    alone = {(i, j): served.answer(prompt, each) for i, each in enumerate(adapters) for j, prompt in enumerate(prompts)}
    assert len({tuple(alone[i, 0]) for i in range(3)}) == 3, "each adapter changes the answer"
    names = {(i, j): served.submit(prompts[j], adapters[i]) for i, j in alone}
    assert {key: served.tokens(name) for key, name in names.items()} == alone


def test_the_scale_of_an_adapter_counts(served: Served) -> None:
    answers = [served.answer(PROMPT, make_adapter(served.spec, 1, 4, alpha)) for alpha in (4.0, 16.0)]
    assert answers[0] != answers[1]


def test_many_more_adapters_than_slots(served: Served) -> None:
    adapters = [make_adapter(served.spec, seed, 1 + seed % MAX_LORA_RANK) for seed in range(10, 10 + 5 * MAX_LORAS)]
    alone = [served.answer(PROMPT, adapter) for adapter in adapters]
    names = [served.submit(PROMPT, adapter) for adapter in reversed(adapters)]
    assert [served.tokens(name) for name in names] == alone[::-1]
    assert len(served.residents()) <= MAX_LORAS


def test_a_seed_decides_what_is_drawn(served: Served) -> None:
    draws = [served.answer(PROMPT, temperature=1.0, seed=seed) for seed in (1, 1, 2, (1 << 64) - 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_log_probabilities_come_with_each_token(served: Served) -> None:
    name = served.submit(PROMPT, num_logprobs=3)
    tokens = served.tokens(name)
    lines = [line for chunk in served.chunks[name] for line in chunk.logprobs]
    assert [line.token_id for line in lines] == tokens
    for line in lines:
        assert len(line.top) == 3
        assert line.top[0] == (line.token_id, line.logprob), "a greedy token is the most likely one"
        assert [value for _, value in line.top] == sorted((value for _, value in line.top), reverse=True)
    chosen = served.submit(PROMPT, num_logprobs=0)
    assert served.tokens(chosen) == tokens
    assert all(line.top == () for chunk in served.chunks[chosen] for line in chunk.logprobs)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_log_probabilities_of_a_prompt_are_those_of_generating_it(served: Served, max_tokens: int) -> None:
    adapter = make_adapter(served.spec, 1)
    name = served.submit(PROMPT, adapter, num_logprobs=2)
    tokens = served.tokens(name)
    generated = [line for chunk in served.chunks[name] for line in chunk.logprobs]
    again = served.submit((*PROMPT, *tokens), adapter, prompt_logprobs=2, max_tokens=max_tokens)
    assert len(served.tokens(again)) == max_tokens
    (lines,) = [chunk.prompt_logprobs for chunk in served.chunks[again] if chunk.prompt_logprobs]
    assert [line.token_id for line in lines] == [*PROMPT[1:], *tokens]
    for one, other in zip(generated, lines[len(PROMPT) - 1 :], strict=True):
        assert other.rank == 1, "a greedy token is the most likely one"
        assert [token_id for token_id, _ in other.top] == [token_id for token_id, _ in one.top]
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)


def test_a_resumed_request_goes_on_where_it_was(served: Served) -> None:
    tokens = served.answer(PROMPT)
    name = served.submit(PROMPT, resume=tuple(tokens[:3]))
    assert served.tokens(name) == tokens[3:]
    usage = served.last(name).usage
    assert usage is not None
    assert usage.completion_tokens == 8
    done = served.submit(PROMPT, resume=tuple(tokens))
    assert served.tokens(done) == []
    assert served.last(done).finish_reason == "length"


def test_an_abort_ends_a_request_and_frees_its_place(served: Served) -> None:
    adapter = make_adapter(served.spec, 1)
    names = [served.submit(PROMPT, adapter, max_tokens=200) for _ in range(2 * MAX_NUM_SEQS)]
    served.wait(lambda: any(name in served.chunks for name in names))
    for name in names:
        served.engine.abort(name)
    served.engine.abort("unknown")
    reasons = {served.last(name).finish_reason for name in names}
    assert reasons <= {"abort", "length"}
    assert "abort" in reasons
    assert len(served.answer(PROMPT)) == 8


def test_a_loaded_adapter_is_resident_until_it_is_unloaded(served: Served) -> None:
    adapter = make_adapter(served.spec, 40)
    digest = adapter.card.digest
    assert served.engine.load_adapter(adapter, ref_of(adapter)).result(60) == adapter.card.size_bytes
    assert served.engine.load_adapter(adapter, ref_of(adapter)).result(60) == 0
    assert digest in served.residents()
    before = served.engine.stats()
    answer = served.answer(PROMPT, adapter)
    assert served.engine.stats().num_adapter_hits == before.num_adapter_hits + 1
    assert served.engine.unload_adapter(digest).result(60) > 0
    assert digest not in served.residents()
    assert served.engine.unload_adapter(digest).result(60) == 0
    assert served.answer(PROMPT, adapter) == answer, "it is loaded again"


def test_pinned_adapters_stay_and_leave_no_room(served: Served) -> None:
    adapters = [make_adapter(served.spec, seed) for seed in range(50, 50 + MAX_LORAS + 1)]
    pinned = [adapter.card.digest for adapter in adapters[:MAX_LORAS]]
    served.engine.pin_adapters(pinned[:1])
    first = served.answer(PROMPT, adapters[0])
    for adapter in adapters[1:]:
        served.answer(PROMPT, adapter)
    assert pinned[0] in served.residents()
    served.engine.pin_adapters(pinned)
    for adapter in adapters[:MAX_LORAS]:
        served.engine.load_adapter(adapter, ref_of(adapter)).result(60)
    assert isinstance(served.last(served.submit(PROMPT, adapters[-1])).error, AdapterPoolFull)
    with pytest.raises(AdapterPoolFull):
        served.engine.load_adapter(adapters[-1], ref_of(adapters[-1])).result(60)
    assert served.answer(PROMPT, adapters[0]) == first
    served.engine.pin_adapters(())
    assert len(served.answer(PROMPT, adapters[-1])) == 8


def test_what_can_never_be_computed_is_refused(served: Served) -> None:
    with pytest.raises(ContextOverflow):
        served.submit(PROMPT, max_tokens=10_000)
    with pytest.raises(InvalidRequest, match="temperature"):
        served.submit(PROMPT, temperature=-1.0)
    with pytest.raises(InvalidRequest, match="token_ids"):
        served.submit((5, 1_000_000))
    with pytest.raises(AdapterTooLarge):
        served.submit(PROMPT, make_adapter(served.spec, 1, 512))
    with pytest.raises(AdapterTooLarge):
        served.engine.load_adapter(too_large := make_adapter(served.spec, 1, 512), ref_of(too_large))
    with pytest.raises(AdapterMismatch):
        served.submit(PROMPT, make_adapter(replace(served.spec, digest="another base"), 1))


def test_a_full_queue_is_an_error_and_a_tenant_with_less_gets_its_place(served: Served) -> None:
    names: list[str] = []

    def flood() -> None:
        for _ in range(MAX_QUEUED + MAX_NUM_SEQS + 2):
            names.append(served.submit(PROMPT, max_tokens=200, tenant_id="flood"))

    with pytest.raises(QueueFull):
        flood()
    other = served.submit(PROMPT, tenant_id="other")
    assert len(served.tokens(other)) == 8
    for name in names:
        served.engine.abort(name)
    errors = [served.last(name).error for name in names]
    assert sum(isinstance(error, QueueFull) for error in errors) == 1, "the flood's newest gave way"


def test_a_tenant_does_not_wait_for_another_ones_flood(served: Served) -> None:
    flood = [served.submit(PROMPT, max_tokens=80, tenant_id="flood") for _ in range(MAX_QUEUED)]
    other = served.submit(PROMPT, tenant_id="other")
    assert served.num_ended_after(other, flood) > MAX_QUEUED // 3, "it was served before most of the flood"


def test_batch_requests_come_last_and_leave_places(served: Served) -> None:
    batch = [served.submit(PROMPT, max_tokens=80, is_batch=True) for _ in range(MAX_QUEUED - 4)]
    other = served.submit(PROMPT)
    assert served.num_ended_after(other, batch) > len(batch) // 2
    for name in batch:
        assert len(served.tokens(name)) == 80


def test_counts_and_usage_agree(served: Served) -> None:
    before = served.engine.stats()
    adapter = make_adapter(served.spec, 60)
    long = tuple(3 + index % 90 for index in range(150))  # longer than any engine's block
    names = [served.submit(long, adapter, tenant_id=tenant) for tenant in ("a", "b", "a")]
    for name in names:
        served.last(name)
    again = served.submit(long, adapter)
    served.last(again)
    usages = [served.last(name).request_usage for name in (*names, again)]
    after = served.engine.stats()
    assert sum(u.prompt_tokens for u in usages if u) == after.num_prompt_tokens - before.num_prompt_tokens == 600
    assert sum(u.completion_tokens for u in usages if u) == after.num_tokens_generated - before.num_tokens_generated
    assert sum(u.cached_tokens for u in usages if u) == after.num_cached_tokens - before.num_cached_tokens
    assert sum(u.num_loads for u in usages if u) == after.num_adapter_writes - before.num_adapter_writes == 1
    assert usages[-1] is not None
    assert usages[-1].cached_tokens > 0, "the prefix was cached"
    other = served.submit(long, adapter, cache_salt=b"another tenant's")
    usage = served.last(other).request_usage
    assert usage is not None
    assert usage.cached_tokens == 0, "and only for its tenant"
    service = served.engine.service()
    assert set(service.served) >= {"a", "b"}


@pytest.mark.parametrize("served", [each for each in ENGINES if each != "fake"], indirect=True)
def test_an_answer_follows_its_grammar(served: Served) -> None:
    (eos,) = served.spec.eos_token_ids
    texts = {"ab": regex_grammar("a[bc]", "regex"), '"a"': json_grammar({"const": "a"}, "schema")}
    for text, grammar in texts.items():
        tokens = served.answer(PROMPT, grammar=grammar, ignore_eos=False)
        assert tokens[-1] == eos
        answer = "".join(chr(token_id + 30) for token_id in tokens[:-1])
        assert answer in {text, text.replace("b", "c")}


@pytest.mark.parametrize("kind", ENGINES)
def test_a_stop_answers_all_and_then_refuses(kind: str, folder: Path) -> None:
    served = Served(kind, folder)
    adapter = make_adapter(served.spec, 1)
    names = [served.submit(PROMPT, adapter, max_tokens=200) for _ in range(MAX_NUM_SEQS + 2)]
    assert served.engine.stop(60)
    for name in names:
        last = served.last(name)
        assert isinstance(last.error, EngineFailure) or last.finish_reason == "length"
    with pytest.raises(EngineFailure):
        served.submit(PROMPT)
    with pytest.raises(EngineFailure):
        served.engine.load_adapter(adapter, ref_of(adapter)).result(60)
