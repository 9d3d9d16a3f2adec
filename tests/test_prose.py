"""The words of the code: plain English in docstrings, comments and messages; nouns and verbs as names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("app", "load_tests", "examples")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

#: A docstring that begins with one of these is a fragment, not a sentence.
OPENINGS = frozenset({"Of", "Those", "Who", "Whose", "Its", "As", "From"})
WORDS = re.compile(r"\b(told|heard|nobody|anew|at hand)\b", re.IGNORECASE)
#: Single words that end like a participle and are nouns, verbs, or what Python itself calls such a thing.
NO_PARTICIPLES = frozenset({"closed", "embed", "feed", "need", "read", "seed", "shed", "speed", "unbounded"})
IRREGULAR = frozenset(
    [
        "begun",
        "brought",
        "drawn",
        "found",
        "given",
        "gone",
        "grown",
        "heard",
        "held",
        "kept",
        "known",
        "left",
        "lent",
        "made",
        "met",
        "said",
        "seen",
        "sent",
        "shown",
        "spent",
        "taken",
        "told",
        "unread",
        "written",
    ]
)


def is_participle(name: str) -> bool:
    """Whether a function's, class's or module's name is a bare participle, such as `told` or `_described`."""
    word = name.strip("_")
    if word[1:] != word[1:].lower():
        return False  # a class named by several words, such as AdapterUnloaded
    word = word.lower()
    return word not in NO_PARTICIPLES and (word in IRREGULAR or re.fullmatch(r"[a-z]+ed", word) is not None)


def docstrings_and_names(tree: ast.Module) -> Iterator[tuple[int, str | None, str | None]]:
    """(line, docstring or None, name or None) of a module and of each class and function in it."""
    yield 1, ast.get_docstring(tree), None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, ast.get_docstring(node), node.name


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def complaints(name: str, source: str) -> list[str]:
    """What is wrong with a file's words."""
    found = [f"{name}: the module's name is a participle"] if is_participle(Path(name).stem) else []
    for line, docstring, symbol in docstrings_and_names(ast.parse(source)):
        if docstring and docstring.split(maxsplit=1)[0].rstrip(",.:;") in OPENINGS:
            found.append(f"{name}:{line}: the docstring begins with {docstring.split(maxsplit=1)[0]!r}")
        if symbol and is_participle(symbol):
            found.append(f"{name}:{line}: {symbol} is named by a participle")
    for line, text in prose_of(source):
        found += [f"{name}:{line}: {match[0]!r}" for match in WORDS.finditer(text)]
    return found


@pytest.mark.parametrize(
    ("source", "num_complaints"),
    [
        ('"""Rows of one layer."""\n', 0),
        ('"""Of one layer."""\n', 1),
        ("def told() -> None: ...\n", 1),
        ("def _described() -> None: ...\n", 1),
        ("def tell() -> None: ...\n", 0),
        ("class Kept: ...\n", 1),
        ("class AdapterUnloaded: ...\n", 0),
        ("x = 'nobody is here'  # at hand\n", 2),
        ("def seed() -> None: ...\n", 0),
    ],
)
def test_the_check_finds_what_it_is_for(source: str, num_complaints: int) -> None:
    assert len(complaints("x.py", source)) == num_complaints


def test_docstrings_comments_messages_and_names_are_plain() -> None:
    found = [
        line for file in FILES for line in complaints(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    ]
    assert found == [], f"{len(found)} places:\n" + "\n".join(found)
