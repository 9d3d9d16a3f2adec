"""URIs of a file that is published in parts, as package indexes that limit a file's size need it.

In: a URI with ranges, `pypi://tiny-part{1..4}==1.0/tiny_part{1..4}/tiny.gguf.part{00..03}`. Out: the parts' URIs in
their order, and the name of the whole. All ranges count together, and a range keeps the width of its first number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from app.engine.errors import SourceError

_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}")
_PART_SUFFIX = re.compile(r"[._-]*(part)?[._-]*\{.*")
_MAX_PARTS = 1000


def part_uris(uri: str) -> list[str]:
    """The parts' URIs; of a URI without ranges itself. SourceError where the ranges differ in length."""
    ranges: Sequence[tuple[str, str]] = _RANGE.findall(uri)
    if not ranges:
        return [uri]
    lengths = {int(last) - int(first) + 1 for first, last in ranges}
    if len(lengths) != 1 or not 1 <= min(lengths) <= _MAX_PARTS:
        raise SourceError(
            f"the ranges of {uri!r} have {sorted(lengths)} numbers; all need the same count, 1 to {_MAX_PARTS}"
        )
    return [
        _RANGE.sub(lambda found, step=step: f"{int(found[1]) + step:0{len(found[1])}}", uri)  # type: ignore[misc]
        for step in range(min(lengths))
    ]


def whole_name(uri: str) -> str:
    """The file's name without what tells its parts apart; SourceError if nothing is left of it."""
    name = _PART_SUFFIX.sub("", PurePosixPath(uri).name)
    if uri.endswith("/") or not name:
        raise SourceError(f"{uri!r} names no file that parts could make; a folder is published whole")
    return name
