"""The JSON Schema Test Suite: what is enforced is enforced wholly, the rest is refused; the docs say which is which."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.engine.errors import InvalidRequest
from app.engine.structured_output import grammar_builder
from app.engine.structured_output.backend_guidance import Vocabulary
from tests.engine.structured_output.tokens import tiny_tokenizer, tiny_vocabulary

DOCS = Path(__file__).parents[3] / "docs" / "how-to/structured-outputs.md"
CASES = [json.loads(line) for line in (Path(__file__).parent / "draft_2020_12.jsonl").read_text().splitlines()]
#: Texts that are valid, and that no answer will be: numbers and keys are written in one way, and `format` is enforced.
NARROWER = {"additionalProperties": 1, "allOf": 2, "const": 5, "enum": 4, "format": 10, "maxLength": 1, "type": 1}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return tiny_vocabulary()


def refusal(vocabulary: Vocabulary, schema: Any) -> str:
    try:
        return vocabulary.complaint(grammar_builder.json_grammar(schema, "schema"))
    except InvalidRequest as error:
        return str(error)


def is_possible(vocabulary: Vocabulary, schema: Any, value: Any) -> bool:
    """Whether an answer may be this value, as Python writes it."""
    matcher = vocabulary.matcher(grammar_builder.json_grammar(schema, "schema"), "t")
    try:
        matcher.consume(Tokenizer.from_str(tiny_tokenizer()).encode(json.dumps(value)).ids)
    except InvalidRequest:
        return False
    return matcher.is_complete()


def test_no_schema_of_the_suite_that_is_taken_lets_an_invalid_value_through(vocabulary: Vocabulary) -> None:
    num_valid, num_invalid, narrower = 0, 0, Counter[str]()
    for case in CASES:
        if refusal(vocabulary, case["schema"]):
            continue
        for value, is_valid in case["tests"]:
            taken = is_possible(vocabulary, case["schema"], value)
            assert is_valid or not taken, (case["schema"], value)
            narrower[case["keyword"]] += is_valid and not taken
            num_valid += is_valid
            num_invalid += not is_valid
    assert +narrower == NARROWER
    assert num_valid > 300
    assert num_invalid > 200


def test_the_docs_say_which_keywords_are_enforced(vocabulary: Vocabulary) -> None:
    taken, refused = set[str](), set[str]()
    for case in CASES:
        (refused if refusal(vocabulary, case["schema"]) else taken).add(case["keyword"])
    kinds = {"enforced": taken - refused, "enforced or rejected": taken & refused, "rejected": refused - taken}
    lines = [f"- {kind}: {', '.join(f'`{keyword}`' for keyword in sorted(found))}" for kind, found in kinds.items()]
    docs, num_tests = DOCS.read_text(), sum(len(case["tests"]) for case in CASES)
    assert f"{num_tests:,} required tests" in docs
    assert "\n".join(lines) in docs, "\n".join(lines)


@pytest.mark.parametrize("schema", [True, {}])
@pytest.mark.parametrize("value", ["x", [1, None], {"a": {"b": 1.5}}])
def test_a_schema_that_allows_everything(vocabulary: Vocabulary, schema: Any, value: Any) -> None:
    assert is_possible(vocabulary, schema, value)


def test_a_schema_that_allows_nothing_is_refused_in_words(vocabulary: Vocabulary) -> None:
    assert "Unsatisfiable" in refusal(vocabulary, False)
