"""PEFT's rules for matching module names, in linear time.

Patterns come from untrusted files, so they run in RE2 (through pyarrow) and never in Python's `re`, where a pattern of
thirty characters can take years. RE2 has no lookaround and no back references; a pattern that needs them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

_MAX_PATTERN_CHARS = 4096
#: Escaped letters that mean the same in Python's `re` and in RE2.
_SHARED_ESCAPES = frozenset("dDwWsSbB")
#: Syntax that the two read differently: a repetition without a minimum, a named class within a class.
_UNLIKE = ("{,", "[:")


def full_matches(pattern: str, names: Sequence[str], key: str) -> list[bool]:
    """Per name, whether the whole of it matches (`re.fullmatch`). `key` names the setting in errors."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise AdapterFormatError(
            f"{key}: a pattern of {len(pattern)} characters; at most {_MAX_PATTERN_CHARS}, or list the modules"
        )
    for escaped in re.findall(r"\\(.)", pattern):
        if escaped.isalnum() and escaped not in _SHARED_ESCAPES:
            raise AdapterFormatError(f"{key}: pattern {short(pattern)} uses \\{escaped}; list the module names instead")
    for unlike in _UNLIKE:
        if unlike in pattern:
            raise AdapterFormatError(f"{key}: pattern {short(pattern)} uses {unlike}; list the module names instead")
    try:
        pc.match_substring_regex(
            pa.array([""]), pattern=pattern
        )  # compile it alone first: "a)|(b" must not close our group
        found = pc.match_substring_regex(pa.array(names, pa.string()), pattern=rf"\A(?:{pattern})\z")
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise AdapterFormatError(
            f"{key}: pattern {short(pattern)} is not understood ({str(error)[:200]}); list the module names instead"
        ) from error
    matches: list[bool] = found.to_pylist()
    return matches


def first_matching(patterns: Sequence[str], names: Sequence[str], key: str) -> dict[str, str]:
    """Per name, the first of `patterns` that equals it or matches its end after a dot; names without one are absent.

    PEFT's `get_pattern_key`: `re.match(rf"(.*\\.)?({pattern})$", name)`.
    """
    chosen: dict[str, str] = {}
    for pattern in patterns:
        open_names = [name for name in names if name not in chosen]
        for name, matched in zip(open_names, full_matches(rf"(?:.*\.)?(?:{pattern})", open_names, key), strict=True):
            if matched:
                chosen[name] = pattern
    for name in names:
        if name not in chosen and name in patterns:
            chosen[name] = name
    return chosen


def matches_entry(name: str, entries: Sequence[str]) -> bool:
    """PEFT's rule for a list of names: equal, or equal to the end after a dot."""
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)
