"""Strict JSON of clients: no repeated key, no NaN, no half of a surrogate pair, bounded nesting and number of values.

A body of 4 MiB can hold 1.4 million empty lists, which take seconds to make and to garbage-collect. Values are
therefore counted in the bytes before anything is made of them. A long text is parsed in a thread: `parse_json` calls
back into Python for objects and fractions, so the event loop's thread gets its turns.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from operator import add, gt
from typing import Any

from app.deployments.ingress.error_responses import InvalidJson

#: Levels of nesting; a JSON schema may have 64 (`grammar_builder.MAX_DEPTH`), within a tool within a body.
MAX_DEPTH = 128
#: Objects and lists in one text, members of its objects, and values of any kind. No thread gets its turn while a large
#: object is read: 98,000 members take 30 ms.
MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES = 65_536, 98_304, 524_288
_MOST = (MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES)

#: Possessive, so that a string without an end is no reason to begin again.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
#: An escape; group 1 is half of a surrogate pair without the other half.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F])|.)", re.DOTALL)


def parse_json(text: bytes, what: str = "the body") -> object:
    """The value of a JSON text; `what` names it in errors. Raises InvalidJson."""
    _check_size(text, what)
    if _SURROGATE.search(text) and any(escape[1] for escape in _ESCAPE.finditer(text)):
        raise InvalidJson(f"{what} has half of a surrogate pair in an escape; send valid Unicode")
    try:
        value: object = json.loads(
            text.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_float, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise InvalidJson(f"{what} is not JSON: {str(error)[:200] or type(error).__name__}") from error
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check_depth(value, what)
    return value


def _check_size(text: bytes, what: str) -> None:
    """Raises InvalidJson for a text with more values than allowed. Brackets, colons and commas in strings do not
    count."""
    found = _sizes(text)
    if any(map(gt, found, _MOST)):
        found, end = [0, 0, 0], 0
        for string in _STRING.finditer(text):
            if string.start() > end:
                found = list(map(add, found, _sizes(text[end : string.start()])))
            end = string.end()
        found = list(map(add, found, _sizes(text[end:])))
    for number, most, name in zip(found, _MOST, ("objects and lists", "members of objects", "values"), strict=True):
        if number > most:
            raise InvalidJson(f"{what} has {number} {name}; at most {most} are allowed")


def _sizes(text: bytes) -> list[int]:
    """Numbers of containers, of members of objects, and of values, which are as many as brackets and commas."""
    num_containers = text.count(b"[") + text.count(b"{")
    return [num_containers, text.count(b":"), num_containers + text.count(b",")]


def _check_depth(value: object, what: str) -> None:
    """Raises InvalidJson for a value with more than `MAX_DEPTH` levels. Without recursion, level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise InvalidJson(f"{what} is nested deeper than {MAX_DEPTH} levels; flatten it")


def _float(text: str) -> float:
    """A function of Python's: where it is called, another thread may get its turn.

    Refuses numbers such as 1e400, which would be written back as Infinity, and that is not JSON.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:80]} is not finite as a 64-bit float")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return values
