"""Grammars as text, from a JSON schema, a regular expression, a list of choices or Lark rules.

The result is for `backend_guidance.Vocabulary`; an InvalidRequest names the place and the limit. Sizes are checked
before llguidance sees anything: some of its steps recurse once per rule, and a client must not overflow the stack of a
process that serves others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from app.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Limits of a grammar's text, of that of all tools together, and of a regular expression. 128 tools with three
#: described arguments have 115,000 characters, and compile within 40 ms.
MAX_GRAMMAR_CHARS, MAX_TOOL_GRAMMAR_CHARS, MAX_REGEX_CHARS = 65_536, 262_144, 4096
#: Limits of a JSON schema: levels, values at all levels together, references.
MAX_DEPTH, MAX_VALUES, MAX_REFERENCES = 64, 4000, 300
#: Rules and terminals of a client's Lark grammar.
MAX_RULES = 100
MAX_CHOICES = 1000

#: JSON as Python's json and chat templates write it: one space after separators, no unbounded whitespace.
_JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
}
_FREE_SPACE: JsonCompileOptions = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True}
_DIRECTIVES = frozenset({"ignore", "import", "regex", "llguidance"})
#: The beginning of a line that defines a rule. No two repetitions take the same characters: matching is linear.
_RULE = re.compile(r"\s*[?!]?\w[^:\"/]*:")
_DIRECTIVE = re.compile(r"%(\w+)")
#: Keywords whose value has schemas by name, in a list, or is one schema.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS, _SINGLE = ("anyOf", "allOf", "oneOf", "prefixItems"), ("items", "additionalProperties", "not")


def json_grammar(schema: Mapping[str, Any] | bool, place: str, *, lenient: bool = False) -> str:
    """A grammar of the JSON values that are valid by this schema. `lenient` leaves out keywords that cannot be
    enforced.

    `place` is the request field of the schema, for messages. Raises InvalidRequest.
    """
    check_schema(schema, place)
    text = json.dumps(_as_object(schema))
    return _build(lambda: LLMatcher.grammar_from_json_schema(text, overrides=_options(lenient=lenient)), place)


def schema_rule(schema: Mapping[str, Any] | bool, place: str, *, lenient: bool) -> str:
    """The same as the right side of a Lark rule."""
    check_schema(schema, place)
    return "%json " + json.dumps(_as_object(schema) | {"x-guidance": _options(lenient=lenient)})


def with_any_white_space(grammar: str) -> str:
    """A grammar whose JSON may have white space wherever JSON allows it, for an answer that the client has begun."""
    for lenient in (False, True):
        for separators in ((",", ":"), (", ", ": ")):
            options = _options(lenient=lenient)
            fixed, free = (json.dumps(each, separators=separators) for each in (options, options | _FREE_SPACE))
            grammar = grammar.replace(f'"x-guidance":{separators[1][1:]}{fixed}', f'"x-guidance":{free}')
    return grammar


def regex_grammar(pattern: str, place: str) -> str:
    """A grammar of the texts that the whole expression matches. Raises InvalidRequest."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidRequest(
            f"{place}: has {len(pattern)} characters; at most {MAX_REGEX_CHARS} are allowed", param=place
        )
    return _build(lambda: LLMatcher.grammar_from_regex(pattern), place)


def choice_grammar(choices: Sequence[str], place: str) -> str:
    """A grammar of these texts. Raises InvalidRequest."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{place}: has {len(choices)} choices; give 1 to {MAX_CHOICES}", param=place)
    if "" in choices:
        raise InvalidRequest(f"{place}: has an empty choice; every choice needs at least one character", param=place)
    return lark_grammar("start: " + " | ".join(quote(choice) for choice in choices), place)


def lark_grammar(text: str, place: str, max_chars: int = MAX_GRAMMAR_CHARS) -> str:
    """A grammar of the texts that these rules derive from `start`. Raises InvalidRequest."""
    check_length(text, place, max_chars)
    return _build(lambda: LLMatcher.grammar_from_lark(text), place)


def client_lark_grammar(text: str, place: str) -> str:
    """The same for a client's own rules, which are limited further. Raises InvalidRequest."""
    check_length(text, place)
    num_rules = sum(_RULE.match(line) is not None for line in text.split("\n"))
    if num_rules > MAX_RULES:
        raise InvalidRequest(f"{place}: has {num_rules} rules; at most {MAX_RULES} are allowed", param=place)
    unknown = next((name for name in _DIRECTIVE.findall(text) if name not in _DIRECTIVES), None)
    if unknown is not None:
        raise InvalidRequest(
            f"{place}: %{unknown[:40]} is not supported in a grammar; send a schema as json", param=place
        )
    return lark_grammar(text, place)


def check_length(text: str, place: str, max_chars: int = MAX_GRAMMAR_CHARS) -> None:
    """Raise InvalidRequest for a longer text."""
    if len(text) > max_chars:
        raise InvalidRequest(f"{place}: has {len(text)} characters; at most {max_chars} are allowed", param=place)


def quote(text: str) -> str:
    """A text as a Lark grammar writes it."""
    return json.dumps(text, ensure_ascii=False)


def check_schema(schema: object, place: str) -> None:
    """Raise InvalidRequest for a value that is no schema, or for a schema above the limits."""
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{place}: a JSON schema is an object, not {type(schema).__name__}", param=place)
    num_references = 0
    for num_values, (depth, key, _) in enumerate(_values(schema), 1):
        num_references += key == "$ref"
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{place}: is nested deeper than {MAX_DEPTH} levels; flatten it", param=place)
        if num_values > MAX_VALUES or num_references > MAX_REFERENCES:
            raise InvalidRequest(
                f"{place}: has more than {MAX_VALUES} values or {MAX_REFERENCES} references; make it smaller",
                param=place,
            )
    if len(json.dumps(schema)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{place}: is longer than {MAX_GRAMMAR_CHARS} characters", param=place)


def below(pointer: str, *keys: str | int) -> str:
    """A JSON pointer (RFC 6901) extended by these keys."""
    return pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def subschemas(schema: object, pointer: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly below one, each with its JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _BY_NAME:
        named = schema.get(keyword)
        for name, inner in named.items() if isinstance(named, Mapping) else ():
            if isinstance(inner, Mapping):
                yield below(pointer, keyword, name), inner
    for keyword in _LISTS:
        listed = schema.get(keyword)
        for index, inner in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(inner, Mapping):
                yield below(pointer, keyword, index), inner
    for keyword in _SINGLE:
        inner = schema.get(keyword)
        if isinstance(inner, Mapping):
            yield below(pointer, keyword), inner


def _as_object(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """The schema as an object, because llguidance takes its options beside a schema's keywords."""
    return dict(schema) if isinstance(schema, Mapping) else {} if schema else {"allOf": [False]}


def _build(make: Callable[[], str], place: str) -> str:
    """Call llguidance; a value that it cannot represent (half a surrogate, a huge number) is an InvalidRequest."""
    try:
        return make()
    except ValueError as error:  # UnicodeEncodeError among them
        reason = "half a surrogate" if isinstance(error, UnicodeError) else str(error)[:200]
        raise InvalidRequest(f"{place}: has a value that no grammar can represent: {reason}", param=place) from None


def _options(*, lenient: bool) -> JsonCompileOptions:
    """All options of the schema compiler, so that a schema's own `x-guidance` changes none."""
    return {**_JSON_OPTIONS, "lenient": lenient}


def _values(value: object) -> Iterator[tuple[int, str, object]]:
    """Every value at any depth, with its depth and its key. Without recursion: the depth is not checked yet."""
    stack: list[tuple[int, str, object]] = [(1, "", value)]
    while stack:
        depth, key, item = stack.pop()
        yield depth, key, item
        # One value more than is allowed is enough to refuse a schema.
        if isinstance(item, Mapping):
            stack += [(depth + 1, str(name), inner) for name, inner in islice(item.items(), MAX_VALUES + 1)]
        elif isinstance(item, list):
            stack += [(depth + 1, "", inner) for inner in item[: MAX_VALUES + 1]]
