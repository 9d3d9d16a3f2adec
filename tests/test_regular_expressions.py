"""Regular expressions that meet text of strangers take time in proportion to its length.

Python's `re` backtracks: where two repetitions can take the same characters, or a search begins again at each of them,
32,000 characters can hold the interpreter for a minute. Every pattern in `app/` is found in the source, with the
methods that are called on it, and is timed on texts that repeat what its own repetitions take.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
METHODS = frozenset({"match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split"})
#: Text of the operator alone: settings, commands, HAProxy's own configuration.
OPERATORS = ("app/cli/", "app/config.py", "app/kernels/", "app/simulation/")
#: Eight times the characters: linear is 8, quadratic 64.
SHORT, LONG, LARGEST_RATIO = 500, 4_000, 24


class Use(NamedTuple):
    """A pattern and one method that is called on it."""

    place: str
    pattern: re.Pattern[Any]
    method: str


def uses() -> Iterator[Use]:
    """Every regular expression in `app/`; a compiled one once per method that its module calls on it."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(OPERATORS):
            continue
        tree = ast.parse(path.read_text())
        imported = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
        if "re" not in imported:
            continue
        methods: dict[str, set[str]] = {}
        direct: list[ast.Call] = []
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, method = node.func.value, node.func.attr
            if isinstance(owner, ast.Name) and owner.id == "re":
                direct.append(node)
            elif isinstance(owner, ast.Name) and method in METHODS:
                methods.setdefault(owner.id, set()).add(method)
        module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
        compiled: dict[re.Pattern[Any], set[str]] = {}  # equal patterns share what is called on them
        for attribute, value in vars(module).items():
            if isinstance(value, re.Pattern):
                compiled.setdefault(value, set()).update(methods.get(attribute, ()))
        for call in direct:
            assert isinstance(call.func, ast.Attribute)
            place = f"{name}:{call.lineno}"
            if call.func.attr == "escape":
                continue
            try:
                pattern = eval(compile(ast.Expression(call.args[0]), name, "eval"), vars(module))  # our own source
            except NameError:
                assert place.startswith(LOCAL), f"{place} is made of local variables; say in LOCAL why it is linear"
                continue
            flags = [word for word in call.keywords if word.arg == "flags"]
            others = [*call.args[1:2], *(word.value for word in flags)] if call.func.attr == "compile" else []
            flag = eval(compile(ast.Expression(others[0]), name, "eval"), vars(module)) if others else 0
            found = re.compile(pattern, flag)
            if call.func.attr != "compile":
                yield Use(place, found, call.func.attr)
                continue
            called = compiled.get(found) or {"search"}  # one in a table: the slowest
            yield from (Use(place, found, method) for method in sorted(called))


#: `tools.tool_grammar` splits at the model's own special tokens; `tokenizer` finds them, escaped. `patterns` runs an
#: adapter's own patterns, of any cost, in a process of the adapter's reader and with a limit on processor time.
LOCAL = (
    "app/deployments/ingress/preprocess/tools.py:",
    "app/engine/adapters/formats/patterns.py:",
    "app/engine/models/tokenizers/tokenizer.py:",
)


def sample(items: Any, wild: str = "a") -> str:
    """A text that a parsed pattern takes, about as short as possible. `wild`: what its dots take."""
    text = ""
    for kind, value in items:
        if kind is _constants.LITERAL:
            text += chr(value)
        elif kind is _constants.NOT_LITERAL:
            text += "a" if value != ord("a") else "b"
        elif kind is _constants.IN:
            text += one_of(value)
        elif kind is _constants.ANY:
            text += wild
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            text += sample(value[2], wild) * max(value[0], 1)
        elif kind is _constants.SUBPATTERN:
            text += sample(value[3], wild)
        elif kind is _constants.BRANCH:
            text += sample(value[1][0], wild)
    return text


def one_of(members: Any) -> str:
    alphabet = ["a", "0", " ", "\n", "_", "-", ".", "A", '"', "\\", "/", ":", "~", "é"]
    source = "".join(chr(value) for kind, value in members if kind is _constants.LITERAL)
    negated = any(kind is _constants.NEGATE for kind, _ in members)
    ranges = [value for kind, value in members if kind is _constants.RANGE]
    categories = [value for kind, value in members if kind is _constants.CATEGORY]

    def is_member(char: str) -> bool:
        found = char in source or any(low <= ord(char) <= high for low, high in ranges)
        for category in categories:
            name = str(category)
            is_in = (
                ("WORD" in name and (char.isalnum() or char == "_"))
                or ("DIGIT" in name and char.isdigit())
                or ("SPACE" in name and char.isspace())
            )
            found = found or (is_in != ("NOT" in name))
        return found != negated

    starts = [chr(low) for low, _ in ranges]
    return next(char for char in [*source, *starts, *alphabet] if is_member(char))


def repetitions(items: Any, before: str = "", wild: str = "a") -> Iterator[tuple[str, str]]:
    """(a text that leads to a repetition, what it repeats) for every unbounded repetition of a parsed pattern."""
    for index, (kind, value) in enumerate(items):
        lead = before + sample(items[:index], wild)
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            yield lead, sample(value[2], wild)
            yield from repetitions(value[2], lead, wild)
        elif kind is _constants.SUBPATTERN:
            yield from repetitions(value[3], lead, wild)
        elif kind is _constants.BRANCH:
            for branch in value[1]:
                yield from repetitions(branch, lead, wild)


def attacks(pattern: re.Pattern[Any]) -> set[tuple[str, str]]:
    """(beginning, what follows it again and again)."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    parsed = list(_parser.parse(source, pattern.flags))
    found = {(lead, unit) for lead, unit in repetitions(parsed) if unit}
    for first in sorted({lead[0] for lead, _ in found if lead}):  # dots may take what begins a match
        found |= {(lead, unit) for lead, unit in repetitions(parsed, wild=first) if unit}
    leads = {lead for lead, _ in found} | {""}
    units = {unit for _, unit in found} | leads - {""} | {"\n", " ", "a", "0", ".", sample(parsed) or "a"}
    return {(lead, unit) for lead in leads for unit in units}


def seconds(use: Use, text: Any) -> float:
    """CPU time of the thread, the least of several tries."""
    run = getattr(use.pattern, use.method)
    arguments = (b"" if isinstance(text, bytes) else "", text) if use.method in ("sub", "subn") else (text,)
    best = float("inf")
    for _ in range(3):
        began_s = time.thread_time()
        found = run(*arguments)
        if use.method == "finditer":
            list(found)
        best = min(best, time.thread_time() - began_s)
    return best


def ratio(use: Use, lead: str, unit: str) -> float:
    def text(num_chars: int) -> Any:
        whole = lead + unit * (num_chars // len(unit)) + "\0"
        return whole if isinstance(use.pattern.pattern, str) else whole.encode("latin-1")

    return seconds(use, text(LONG)) / max(seconds(use, text(SHORT)), 2e-6)


USES = list(uses())


@pytest.mark.parametrize("use", USES, ids=[f"{use.place}-{use.method}" for use in USES])
def test_it_is_linear(use: Use) -> None:
    for lead, unit in sorted(attacks(use.pattern)):
        is_linear = any(ratio(use, lead, unit) < LARGEST_RATIO for _ in range(3))  # a busy machine may disturb a try
        assert is_linear, f"{use.place} {use.method} {use.pattern.pattern!r}: {lead!r} + {unit!r} * n"


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"(?m)^\s*[?!]?\w+[^\n:\"/]*:", "findall"),
        (r"(?:a|b)*c", "search"),
        (r'"(?:\\.|[^"\\])*"', "sub"),
    ],
)
def test_one_that_backtracks_is_found(pattern: str, method: str) -> None:
    """The check itself: these are quadratic."""
    use = Use("", re.compile(pattern), method)
    assert any(ratio(use, lead, unit) > LARGEST_RATIO for lead, unit in sorted(attacks(use.pattern)))
