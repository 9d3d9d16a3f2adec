"""Clients' JSON: as strict as before for what is small, and refused before anything is made of what is not."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.ingress.error_responses import InvalidJson
from app.deployments.ingress.json_parser import MAX_CONTAINERS, MAX_DEPTH, MAX_MEMBERS, MAX_VALUES, parse_json
from tests.budgets import examples


def strictly(text: bytes) -> Any:
    """The definition: Python's parser, without repeated keys, NaN, infinity and numbers that it reads as infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if max(Counter(name for name, _ in pairs).values(), default=0) > 1:
            raise ValueError
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(name)

    def finite(number: str) -> float:
        if math.isinf(float(number)):
            raise ValueError(number)
        return float(number)

    return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)


@settings(max_examples=examples(200))
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=30,
    ),
    ascii_only=st.booleans(),
)
def test_a_document_is_what_the_definition_reads(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    if "Infinity" in json.dumps(value, ensure_ascii=False):
        return
    assert repr(parse_json(text)) == repr(strictly(text))


FRAGMENTS = ("{", "}", "[", "]", ",", ":", '"a"', '"b"', "1", "-0", "1e400", "1.5", "NaN", "null", " ", '"\\u00e9"',
             '"\\ud83d\\ude00"', '"\\\\ud800"', '"', "9" * 4400)  # fmt: skip


@settings(max_examples=examples(500))
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_a_text_is_refused_if_the_definition_refuses_it(text: str) -> None:
    try:
        expected = repr(strictly(text.encode()))
    except (ValueError, RecursionError):
        with pytest.raises(InvalidJson):
            parse_json(text.encode())
    else:
        assert repr(parse_json(text.encode())) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a":1,"a":2}', "the key 'a' is given twice"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":[-1e400]}', "the number -1e400 is not finite"),
        (b"9" * 4400, "4300 digits"),
        (b"\xff", "not JSON"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'["\\udc00\\ud800"]', "half of a surrogate pair"),
        (b'{"\\uD83Dx":1}', "half of a surrogate pair"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper than 128 levels"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "is not JSON"),
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", f"at most {MAX_CONTAINERS} are allowed"),
        (b"[" + b"1," * MAX_VALUES + b"1]", f"at most {MAX_VALUES} are allowed"),
        (b"{" + b'":":1,' * MAX_MEMBERS + b'"a":1}', f"{MAX_MEMBERS + 1} members of objects; at most"),
    ],
)
def test_what_is_refused_says_why(text: bytes, words: str) -> None:
    with pytest.raises(InvalidJson, match=words):
        parse_json(text)


def test_brackets_and_commas_in_strings_are_no_values() -> None:
    inside = '[{:,"' * (MAX_VALUES // 2)
    for value in (inside, {"a": [inside, "\\", 1.5]}, [['\\"'] * 3 + [inside]]):
        assert parse_json(json.dumps(value).encode()) == value


def test_the_deepest_and_largest_that_are_allowed_are_read() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    assert len(parse_json(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")) == MAX_VALUES  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", [b"[],", b'"",', b'"\\"', b"\\", b'"', b"{", b'"\\ud83d\\ude00",', b'{"a":1},'])
def test_the_time_grows_with_the_length(unit: bytes) -> None:
    """Linear is 8 times as long for 8 times the bytes, quadratic 64."""

    def seconds(num_bytes: int) -> float:
        best, text = float("inf"), b"[" + unit * (num_bytes // len(unit)) + b"1]"
        for _ in range(3):
            began_s = time.thread_time()
            with contextlib.suppress(InvalidJson):
                parse_json(text)
            best = min(best, time.thread_time() - began_s)
        return best

    assert seconds(1 << 20) < 32 * seconds(1 << 17)
