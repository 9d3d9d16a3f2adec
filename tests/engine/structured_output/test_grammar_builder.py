"""What is taken as a grammar: small ones of every kind; larger ones and those that cannot be enforced are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.engine.constraint import why
from app.engine.errors import InvalidRequest
from app.engine.structured_output import grammar_builder
from app.engine.structured_output.backend_guidance import (
    _MAX_TOTAL_TRIES,
    _MAX_TRIED_CHARS,
    Vocabulary,
    enforceable,
    place_of,
)
from app.engine.structured_output.grammar_builder import MAX_RULES, check_schema, client_lark_grammar
from tests.engine.structured_output.tokens import EOS, tiny_tokenizer, tiny_vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return tiny_vocabulary()


def takes(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    from tokenizers import Tokenizer

    matcher = vocabulary.matcher(grammar, "t")
    try:
        matcher.consume(Tokenizer.from_str(tiny_tokenizer()).encode(text).ids)
    except InvalidRequest:
        return False
    return matcher.is_complete()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_each_kind_of_grammar_takes_its_texts_and_no_others(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    cases = [
        (grammar_builder.json_grammar(schema, "s"), '{"a": 12}', '{"a": "x"}'),
        (grammar_builder.json_grammar({"type": "object"}, "s"), '{"x": [1, null]}', "[1]"),
        (grammar_builder.regex_grammar("[0-9]{3}", "r"), "123", "12"),
        (grammar_builder.choice_grammar(["yes", 'no "really"'], "c"), 'no "really"', "no"),
        (grammar_builder.client_lark_grammar('start: "a"+ tail\ntail: /[b-d]/', "g"), "aaac", "b"),
    ]
    for grammar, good, bad in cases:
        assert takes(vocabulary, grammar, good), good
        assert not takes(vocabulary, grammar, bad), bad


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grammar_builder.json_grammar(nested(100), "s"), "nested deeper than 64"),
        (lambda: grammar_builder.json_grammar({"enum": list(range(5000))}, "s"), "more than 4000 values"),
        (lambda: grammar_builder.json_grammar({"allOf": [{"$ref": "#"}] * 301}, "s"), "300 references"),
        (lambda: grammar_builder.json_grammar({"const": "x" * 70_000}, "s"), "longer than 65536"),
        (lambda: grammar_builder.json_grammar("no schema", "s"), "is an object"),  # type: ignore[arg-type]
        (lambda: grammar_builder.regex_grammar("a" * 5000, "s"), "at most 4096"),
        (lambda: grammar_builder.choice_grammar([], "s"), "1 to 1000"),
        (lambda: grammar_builder.choice_grammar(["a", ""], "s"), "empty choice"),
        (lambda: grammar_builder.client_lark_grammar("start: a\n" + "a: b\n" * 200, "s"), "at most 100"),
        (lambda: grammar_builder.client_lark_grammar("start: %json {}", "s"), "%json is not supported"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_compiled(make: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        make()
    assert caught.value.param == "s"


def test_what_cannot_be_enforced_is_refused_with_its_place(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"fine": {"type": "string"}, "list": {"type": "array", "items": {"not": {"type": "null"}}}},
    }
    assert "not" in vocabulary.complaint(grammar_builder.json_grammar(schema, "s"))
    place, reason = place_of(schema, "s", vocabulary)
    assert place == "#/properties/list/items/not"
    assert "not" in reason
    assert vocabulary.complaint(grammar_builder.json_grammar(schema, "s", lenient=True)) == ""
    by_reference = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "format": "wibble"}}}
    assert place_of(by_reference, "s", vocabulary) == ("#/$defs/x/format", "Unknown format: wibble")
    odd = {"properties": {"a/b~c": {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}}}
    assert place_of(odd, "s", vocabulary)[0] == "#/properties/a~1b~0c/anyOf/1/uniqueItems"
    two = {"items": {"type": "array", "uniqueItems": True, "contains": {}}}
    assert place_of(two, "s", vocabulary)[0] == "#/items", "neither is the only one; the reason names both"
    many = {"anyOf": [{"type": "null"}] * 200 + [{"not": {}}]}
    assert place_of(many, "s", vocabulary)[0] == "#", "as far as it is looked for"


def test_the_search_for_what_cannot_be_enforced_is_bounded(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 20 removals would compile up to 100 schemas, and each of those all of the definitions."""
    bad = {"type": "string", "pattern": "(?=a)b"}
    fine = {f"q{number}": {"type": "string", "pattern": "[a-z]{1,9}"} for number in range(40)}
    properties = {f"p{number}": {"type": "object", "properties": fine | {"z": bad}} for number in range(30)}
    few: Any = {"type": "object", "properties": {"a": bad, "b": bad, "c": {"type": "string"}}}
    compiled: list[str] = []
    complaint = vocabulary.complaint

    def counted(grammar: str) -> str:
        compiled.append(grammar)
        return complaint(grammar)

    monkeypatch.setattr(vocabulary, "complaint", counted)
    few = json.loads(json.dumps(few))  # without values that are one object
    assert enforceable(few, "s", vocabulary)[1] == ("#/properties/a/pattern", "#/properties/b/pattern")
    compiled.clear()
    for many in (properties, {f"p{number}": bad | {"description": str(number)} for number in range(100)}):
        enforceable({"type": "object", "properties": many}, "s", vocabulary)
        assert len(compiled) <= _MAX_TOTAL_TRIES
        assert sum(map(len, compiled[:-1])) <= _MAX_TRIED_CHARS
        compiled.clear()


def test_a_schema_does_not_change_how_it_is_read(vocabulary: Vocabulary) -> None:
    schema = {"not": {}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    assert "not" in vocabulary.complaint(grammar_builder.json_grammar(schema, "s"))


#: Each recurses, multiplies or backtracks in some library; sizes are the largest that are taken.
BOMBS = {
    "nested": grammar_builder.json_grammar(nested(60), "s"),
    "references": grammar_builder.json_grammar(
        {"$ref": "#/$defs/0"}
        | {
            "$defs": {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(290)}
            | {"290": {}}
        },
        "s",
    ),
    "all of": grammar_builder.json_grammar(
        {"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {}}} for k in "ab"]} for i in range(40)]}, "s"
    ),
    "repeated": grammar_builder.regex_grammar("((a{1000}){1000}){1000}", "s"),
    "backtracking": grammar_builder.regex_grammar("(a|b|ab)*c{1,5000}(.*a.*b){20}", "s"),
    "parentheses": grammar_builder.regex_grammar("(" * 2000 + "a" + ")" * 2000, "s"),
    "rules": grammar_builder.client_lark_grammar(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(97)) + '\nr97: "a"', "s"
    ),
    "terminals": grammar_builder.client_lark_grammar(
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(97)) + '\nR97: "a"', "s"
    ),
    "left": grammar_builder.client_lark_grammar('start: start start | "a" | ""', "s"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_time_with_an_answer(name: str, vocabulary: Vocabulary) -> None:
    """It compiles or is refused, and so does each mask; seconds would be minutes without limits."""
    started_s = time.process_time()
    try:
        matcher = vocabulary.matcher(BOMBS[name], "t")
        _follow(matcher, vocabulary)
    except InvalidRequest as error:
        assert len(str(error)) < 500  # noqa: PT017
    assert time.process_time() - started_s < 5


def _follow(matcher: Any, vocabulary: Vocabulary) -> None:
    import numpy as np

    words = np.zeros(vocabulary.num_words, np.uint32)
    for _ in range(30):
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if allowed[0] == EOS:
            return
        matcher.consume([int(allowed[0])])


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammar_builder.json_grammar({"enum": ["\ud800"]}, "place"),
        lambda: grammar_builder.json_grammar({"type": "object", "properties": {"\udc00": {}}}, "place"),
        lambda: grammar_builder.json_grammar({"type": "integer", "maximum": 10**400}, "place"),
        lambda: grammar_builder.regex_grammar("[\ud800]", "place"),
        lambda: grammar_builder.choice_grammar(["yes", "\ud800"], "place"),
        lambda: grammar_builder.client_lark_grammar('start: "\ud800"', "place"),
    ],
)
def test_what_the_library_cannot_hold_is_the_clients_mistake(make: Callable[[], str]) -> None:
    with pytest.raises(InvalidRequest, match=r"^place: has a value that no grammar") as caught:
        make()
    assert caught.value.param == "place"


def test_rules_are_counted_by_line_and_the_length_before_all() -> None:
    rules = "\n".join(f'  ?r{index}: "a"' for index in range(MAX_RULES))
    with pytest.raises(InvalidRequest, match=f"has {MAX_RULES + 1} rules"):
        client_lark_grammar(f"start: r0\n\n{rules}", "grammar")
    for char in ("\n", "a"):
        with pytest.raises(InvalidRequest, match="4194304 characters"):
            client_lark_grammar(char * (4 << 20), "grammar")


def test_a_schema_of_a_million_values_is_refused_without_a_look_at_all() -> None:
    class Long(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all values are looked at")

    with pytest.raises(InvalidRequest, match="more than 4000 values"):
        check_schema({"enum": Long(range(1_000_000))}, "schema")


def test_a_reason_is_one_line_without_the_quoted_grammar() -> None:
    message = "Expected rule\nat line 3\n\n  3 | start: x\n    |        ^ here"
    assert why(message) == "Expected rule at line 3"


@pytest.mark.parametrize("form", ["we\nUnimplemented keys: [x]", "Unimplemented keys: [", "]"])
def test_a_format_may_have_any_text(vocabulary: Vocabulary, form: str) -> None:
    schema = {"type": "array", "items": {"type": "string", "format": form}, "contains": True}
    grammar = grammar_builder.json_grammar(schema, "place", lenient=True)
    assert vocabulary.unknown_keywords(grammar) == {form, "contains"}
