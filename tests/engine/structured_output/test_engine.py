"""An engine with grammars: requests wait for their compilation beside the steps, and end with what it found."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.errors import EngineFailure, InvalidRequest, UnsupportedField
from app.engine.models.tokenizers.tokenizer import NewToken
from app.engine.request import SamplingParams, TokenChunk
from app.engine.structured_output import backend_guidance
from app.engine.structured_output.backend_guidance import Vocabulary
from app.engine.structured_output.grammar_builder import (
    choice_grammar,
    client_lark_grammar,
    json_grammar,
    regex_grammar,
)
from tests.engine.structured_output.tokens import ids_of, text_of, tiny_vocabulary
from tests.fakes import FakeBackend, fake_request, fake_spec

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [True, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMAR = json_grammar(SCHEMA, "schema")
WORDS = json_grammar(SCHEMA | {"properties": {"a": {"enum": ["ab", "bb"]}}}, "schema")


def make_engine(grammars: object = tiny_vocabulary) -> tuple[Engine, FakeBackend]:
    from dataclasses import replace

    spec = replace(fake_spec(), vocab_size=120, eos_token_ids=(2,))
    backend = FakeBackend(BackendLimits(16, 16, 8, 8, 2), spec)
    return Engine(backend, EngineConfig(), lambda: 0.0, grammars), backend  # type: ignore[arg-type]


def params(grammar: str = GRAMMAR, **others: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 5, "grammar": grammar, **others})  # type: ignore[arg-type]


def finish(engine: Engine, *request_ids: str) -> dict[str, list[TokenChunk]]:
    chunks: dict[str, list[TokenChunk]] = {request_id: [] for request_id in request_ids}
    left, end_s = set(request_ids), time.monotonic() + 120
    while left:
        assert time.monotonic() < end_s, left
        if not engine.has_work:
            time.sleep(0.001)
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
            if chunk.finish_reason is not None:
                left.remove(chunk.request_id)
    engine.check()
    return chunks


def answer(chunks: list[TokenChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_an_answer_follows_its_grammar_and_ends_where_it_is_complete() -> None:
    engine, _ = make_engine()
    for seed in range(5):
        engine.submit(fake_request("r", [1, 2, 3], sampling=params(seed=seed)))
        chunks = finish(engine, "r")["r"]
        assert chunks[-1].finish_reason == "stop"
        assert json.loads(text_of(answer(chunks))) in ({"a": True}, {"a": None})
    engine.close()


@pytest.mark.parametrize("own", [(0,), (0, 2)], ids=str)
def test_an_answer_ends_with_its_adapters_own_tokens_where_its_grammar_may_end(own: tuple[int, ...]) -> None:
    engine, _ = make_engine()
    seen = set()
    for seed in range(12):
        engine.submit(fake_request("r", [1, 2, 3], sampling=params(WORDS, seed=seed, eos_token_ids=own)))
        chunks = finish(engine, "r")["r"]
        assert chunks[-1].finish_reason == "stop"
        seen.add(chunks[-1].matched_stop)
        assert json.loads(text_of(answer(chunks)[:-1]))["a"] in ("ab", "bb")
    assert seen == set(own)
    engine.close()


def test_a_resumed_answer_goes_on_where_it_was() -> None:
    engine, _ = make_engine()
    engine.submit(fake_request("r", [1, 2, 3], sampling=params()))
    whole = answer(finish(engine, "r")["r"])
    for count in range(len(whole) + 1):
        engine.submit(fake_request("s", [1, 2, 3], sampling=params(), resume_token_ids=whole[:count]))
        assert answer(finish(engine, "s")["s"]) == whole[count:]
    engine.close()


def test_tokens_that_no_grammar_allows_cannot_be_resumed() -> None:
    engine, _ = make_engine()
    engine.submit(fake_request("r", [1], sampling=params(), resume_token_ids=[50, 51]))
    chunks = finish(engine, "r")["r"]
    assert isinstance(chunks[-1].error, InvalidRequest)
    engine.close()


def test_no_step_waits_for_a_compilation_and_an_abort_ends_it() -> None:
    """The vocabulary is not there before the others have been answered."""
    go = threading.Event()

    def load() -> Vocabulary:
        go.wait(600)
        return tiny_vocabulary()

    engine, _ = make_engine(load)
    engine.submit(fake_request("late", [1, 2], sampling=params()))
    engine.submit(fake_request("gone", [1, 2], sampling=params()))
    assert not engine.has_work
    engine.submit(fake_request("plain", [1, 2]))
    assert finish(engine, "plain")["plain"][-1].error is None
    engine.abort("gone")
    assert finish(engine, "gone")["gone"][-1].finish_reason == "abort"
    go.set()
    assert finish(engine, "late")["late"][-1].finish_reason == "stop"
    engine.close()


def test_what_cannot_be_compiled_ends_its_own_request() -> None:
    engine, _ = make_engine()
    engine.submit(fake_request("bad", [1, 2], sampling=params('{"grammars": 3}')))
    engine.submit(fake_request("good", [1, 2], sampling=params()))
    chunks = finish(engine, "bad", "good")
    assert isinstance(chunks["bad"][-1].error, InvalidRequest)
    assert chunks["good"][-1].finish_reason == "stop"
    engine.close()


def test_a_vocabulary_that_cannot_be_loaded_fails_grammars_alone() -> None:
    def load() -> Vocabulary:
        raise ValueError("no tokenizer")

    engine, _ = make_engine(load)
    engine.submit(fake_request("r", [1], sampling=params()))
    engine.submit(fake_request("plain", [1]))
    chunks = finish(engine, "r", "plain")
    assert isinstance(chunks["r"][-1].error, EngineFailure)
    assert chunks["plain"][-1].error is None
    assert engine.failure is None
    engine.close()


def test_the_first_grammar_loads_the_vocabulary_and_the_others_use_it() -> None:
    loads: list[None] = []

    def load() -> Vocabulary:
        loads.append(None)
        return tiny_vocabulary()

    engine, _ = make_engine(load)
    engine.submit(fake_request("plain", [1]))
    finish(engine, "plain")
    assert loads == [], "an engine is ready sooner, and smaller, without"
    for name in ("first", "second"):
        engine.submit(fake_request(name, [1, 2], sampling=params()))
    assert {chunks[-1].finish_reason for chunks in finish(engine, "first", "second").values()} == {"stop"}
    assert len(loads) == 1
    engine.close()


def test_a_grammar_that_runs_into_a_limit_ends_its_own_request() -> None:
    """Rules that mean the same in ever more ways."""
    ambiguous = client_lark_grammar(
        'start: a a a a a a\na: (b b b b | b b b)+\nb: ("x" | "x" "x" | c)*\nc: b b | "x"', "g"
    )
    engine, _ = make_engine()
    engine.submit(fake_request("bad", [1, 2], sampling=params(ambiguous, max_tokens=200)))
    engine.submit(fake_request("good", [1, 2], sampling=params()))
    chunks = finish(engine, "bad", "good")
    assert chunks["bad"][-1].finish_reason in ("error", "length", "stop")
    assert chunks["good"][-1].finish_reason == "stop"
    engine.close()


def test_an_engine_that_stops_answers_what_is_being_compiled() -> None:
    go = threading.Event()

    def load() -> Vocabulary:
        go.wait(600)
        return tiny_vocabulary()

    engine, _ = make_engine(load)
    engine.submit(fake_request("r", [1, 2], sampling=params()))
    assert [chunk.request_id for chunk in engine.shut_down(EngineFailure("over"))] == ["r"]
    go.set()
    engine.close()


def test_an_engine_without_grammars_refuses_them() -> None:
    engine, _ = make_engine(None)
    with pytest.raises(UnsupportedField, match="no structured outputs"):
        engine.submit(fake_request("r", [1, 2], sampling=params()))


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_a_grammar_says_itself_where_an_answer_ends(field: dict[str, object]) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest, match="cannot be combined with a grammar"):
        engine.submit(fake_request("r", [1], sampling=params(**field)))
    engine.close()


def test_biases_and_an_early_end_reach_the_backend() -> None:
    """Before min_tokens the tokens that end an answer are forbidden; biases hold all along."""
    engine, backend = make_engine()
    backend.keep_batches = True
    sampling = SamplingParams(max_tokens=4, logit_bias=((7, 1.5),), min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    engine.submit(fake_request("r", [1, 2], sampling=sampling))
    finish(engine, "r")
    found = [dict(zip(*map(list, b), strict=True)) for batch in backend.batches for b in batch.sampling.biases if b]
    assert found[:2] == [{7: 1.5, 9: float("-inf")}] * 2
    assert all(bias == {7: 1.5} for bias in found[2:])
    engine.close()


def test_a_regex_over_several_requests_is_compiled_for_each_tenant() -> None:
    vocabulary = tiny_vocabulary()
    grammar = regex_grammar("[0-9]{3}", "r")
    for tenant in ("a", "b", "a"):
        vocabulary.matcher(grammar, tenant).consume([20, 21])  # "12", as tokens "1" and "2"
    assert len(vocabulary._compiled) == 2


def test_compiled_grammars_are_kept_up_to_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_guidance, "_MAX_KEPT_CHARS", 1000)
    vocabulary = tiny_vocabulary()
    grammars = [choice_grammar(["x" * 90 + str(index)], "c") for index in range(30)]
    for grammar in (*grammars, *grammars[-2:]):
        vocabulary.matcher(grammar, "a")
    kept = [grammar for _, grammar in vocabulary._compiled]
    assert 2 <= len(kept) < 15
    assert kept[-2:] == grammars[-2:], "the oldest go first"
    assert vocabulary._num_chars == sum(map(len, kept)) <= 1000


def test_an_adapters_added_tokens_may_be_in_its_answer() -> None:
    """As a special token that its grammar names, beside a request of the base model."""
    engine, _ = make_engine()
    text = AdapterTokenizer(None, {}, {"<call>": NewToken(117, ("special",))}).to_json()
    grammar = client_lark_grammar("start: <[117]> /a/", "grammar")
    engine.submit(fake_request("own", [1, 2, 3], sampling=params(grammar, grammar_tokens=text)))
    engine.submit(fake_request("base", [1, 2, 3], sampling=params()))
    chunks = finish(engine, "own", "base")
    assert answer(chunks["own"])[0] == 117
    assert json.loads(text_of(answer(chunks["base"]))) in ({"a": True}, {"a": None})
    engine.close()


def test_an_adapters_added_tokens_may_write_what_the_bases_do() -> None:
    base = tiny_vocabulary()
    own = base.with_tokens(AdapterTokenizer(None, {}, {"true": NewToken(117, ("normalized",))}).to_json())
    allowed = []
    for vocabulary in (base, own):
        matcher, words = vocabulary.matcher(GRAMMAR, "tenant"), np.zeros(vocabulary.num_words, np.uint32)
        matcher.consume(ids_of('{"a": '))
        matcher.fill(words)
        allowed.append({token for token in range(120) if words[token >> 5] >> np.uint32(token & 31) & 1})
    assert allowed[1] == allowed[0] | {117}
    assert base.with_tokens("") is base


def test_a_vocabulary_with_added_tokens_is_made_without_parsing_the_base_s_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer of a large model has megabytes, and no step runs while Python parses them."""
    base = tiny_vocabulary()
    monkeypatch.setattr(backend_guidance, "json", SimpleNamespace(JSONDecoder=json.JSONDecoder, dumps=json.dumps))
    own = base.with_tokens(AdapterTokenizer(None, {}, {"<call>": NewToken(117, ("special",))}).to_json())
    monkeypatch.undo()
    assert own.matcher(client_lark_grammar("start: <call>", "grammar"), "tenant").forced_token_ids() == [117]
    again = own.with_tokens(AdapterTokenizer(None, {}, {"<end>": NewToken(118, ("special",))}).to_json())
    assert again.matcher(client_lark_grammar("start: <call> <end>", "grammar"), "tenant").forced_token_ids() == [
        117,
        118,
    ]


def test_an_added_token_in_angle_brackets_is_text_unless_it_is_special() -> None:
    """llguidance takes every added token of the form <...> for a special one."""
    call, end = 117, 118
    added = {"<call>": NewToken(call, ()), "<end>": NewToken(end, ("special",))}
    vocabulary = tiny_vocabulary().with_tokens(AdapterTokenizer(None, {}, added).to_json())

    def allowed(grammar: str, *token_ids: int) -> set[int]:
        matcher, words = vocabulary.matcher(grammar, "tenant"), np.zeros(vocabulary.num_words, np.uint32)
        matcher.consume(list(token_ids))
        matcher.fill(words)
        return {token for token in range(120) if words[token >> 5] >> np.uint32(token & 31) & 1}

    string = json_grammar({"type": "string"}, "schema")
    assert allowed(string, *ids_of('"a')) >= {call, *ids_of("<")}
    assert ids_of('"')[0] in allowed(string, *ids_of('"a'), call)
    assert end not in allowed(string, *ids_of('"a'))
    literal = client_lark_grammar('start: ("<call>" | "<b>") <call> /<call>b/', "grammar")
    assert allowed(literal) == {call, *ids_of("<")}
    assert allowed(literal, call) == allowed(literal, *ids_of("<call>")) == {call}
    assert allowed(literal, call, call) == {call}
    assert allowed(client_lark_grammar("start: <end>", "grammar")) == {end}
    forced = vocabulary.matcher(client_lark_grammar('start: "a<call>b"', "grammar"), "tenant")
    assert forced.forced_token_ids() == [*ids_of("a"), call, *ids_of("b")]
    assert "unknown special token" in vocabulary.complaint(client_lark_grammar("start: <other>", "grammar"))
