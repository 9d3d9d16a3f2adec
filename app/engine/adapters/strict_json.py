"""Strict JSON: a repeated key, NaN or too deep nesting is an error.

`json.loads` alone keeps the last of two equal keys, so two readers of one file could disagree about its contents.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from app.engine.errors import AdapterFormatError


def parse_object(contents: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `contents`; `what` names the file in errors (AdapterFormatError)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise AdapterFormatError(f"{what}: key {short(key)} appears twice; keep one")
                seen.add(key)
        return found

    def no_constant(name: str) -> NoReturn:
        raise AdapterFormatError(f"{what}: {name} is not a JSON number; write a finite value")

    try:
        value = json.loads(contents.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError as error:
        raise AdapterFormatError(f"{what}: nested too deeply to be a configuration") from error
    except ValueError as error:  # includes JSONDecodeError, UnicodeDecodeError and integers of 10,000 digits
        raise AdapterFormatError(f"{what}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise AdapterFormatError(f"{what}: holds a {type(value).__name__}, not an object")
    return value


def short(value: object) -> str:
    """`repr(value)`, cut to 120 characters, for error messages about untrusted values."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}… ({len(text)} characters)"
