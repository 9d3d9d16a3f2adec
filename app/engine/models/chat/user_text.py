"""Text that knows which of its characters came from a request, through everything that a chat template does with it.

A prompt has the template's own words and the request's. Only the former may become control tokens, so both are kept
apart while a template joins, cuts and trims them: a `UserText` is a `str` with the ranges of the request's characters.
An operation whose effect on single characters is not known here makes all of its result the request's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, SupportsIndex, TypeVar

from jinja2.runtime import Undefined

F = TypeVar("F", bound=Callable[..., Any])

#: The start and end of a run of characters.
Range = tuple[int, int]
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class UserText(str):
    """Ranges are sorted, not empty and do not touch. Without ranges given, all characters are the request's."""

    __slots__ = ("_ranges",)
    _ranges: tuple[Range, ...]

    def __new__(cls, text: object = "", ranges: Iterable[Range] | None = None) -> UserText:
        new = super().__new__(cls, text)
        if ranges is not None:
            new._ranges = tuple(ranges)
        elif isinstance(text, UserText):
            new._ranges = text._ranges
        else:
            new._ranges = ((0, len(new)),) if new else ()
        return new

    def __str__(self) -> UserText:
        return self

    def __add__(self, other: str) -> UserText:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> UserText:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> UserText:
        return UserText(str.__mul__(self, count), None if self._ranges else ())

    __rmul__ = __mul__

    def __mod__(self, values: object) -> UserText:
        return UserText(str.__mod__(self, values))

    def __rmod__(self, text: str) -> UserText:
        return UserText(str.__mod__(text, self))

    def __iter__(self) -> Iterator[UserText]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> UserText:
        if not isinstance(key, slice):
            text = str.__getitem__(self, key)
            index = key.__index__() % len(self)
            return self._cut(index, index + len(text))
        start, end, step = key.indices(len(self))
        return self._cut(start, max(start, end)) if step == 1 else UserText(str.__getitem__(self, key))

    def strip(self, chars: str | None = None) -> UserText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> UserText:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> UserText:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> UserText:
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str) -> UserText:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[UserText]:  # type: ignore[override]
        return self._pieces(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[UserText]:  # type: ignore[override]
        return self._pieces(str.rsplit(self, sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[UserText]:  # type: ignore[override]
        return self._pieces(str.splitlines(self, keepends))

    def partition(self, sep: str) -> tuple[UserText, UserText, UserText]:
        before, found, behind = self._pieces(str.partition(self, sep))
        return before, found, behind

    def rpartition(self, sep: str) -> tuple[UserText, UserText, UserText]:
        before, found, behind = self._pieces(str.rpartition(self, sep))
        return before, found, behind

    def join(self, parts: Iterable[str]) -> UserText:
        pieces: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"sequence item: expected str instance, {type(part).__name__} found")
            pieces += (self, part) if pieces else (part,)
        return concat(pieces)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> UserText:
        if not old or str.find(self, old) < 0:
            return self if old else UserText(str.replace(self, old, new, count))
        return UserText(new, None if isinstance(new, UserText) else ()).join(self.split(old, count))

    def upper(self) -> UserText:
        return self._with_text(str.upper(self))

    def lower(self) -> UserText:
        return self._with_text(str.lower(self))

    def _with_text(self, text: str) -> UserText:
        """The text after a change that usually keeps each character in its place."""
        return UserText(text, self._ranges if len(text) == len(self) else None)

    def _cut(self, start: int, end: int) -> UserText:
        cut = [(max(first, start) - start, min(last, end) - start) for first, last in self._ranges]
        return UserText(str.__getitem__(self, slice(start, end)), [each for each in cut if each[0] < each[1]])

    def _pieces(self, pieces: Iterable[str], gap: int | None = None) -> list[UserText]:
        """Pieces of this text in their order, each with its ranges. `gap`: characters between two of them; None: any
        that are in no piece."""
        found, position = [], 0
        for piece in pieces:
            start = str.find(self, piece, position) if gap is None else position
            found.append(self._cut(start, start + len(piece)))
            position = start + len(piece) + (gap or 0)
        return found


def user_ranges(text: str) -> tuple[Range, ...]:
    """The ranges of a text's characters that are the request's; none in a plain `str`."""
    return text._ranges if isinstance(text, UserText) else ()


def concat(parts: Iterable[str]) -> UserText:
    """The texts one after the other."""
    texts, ranges, length = [], list[Range](), 0
    for part in parts:
        for first, last in user_ranges(part):
            if ranges and ranges[-1][1] == length + first:
                ranges[-1] = (ranges[-1][0], length + last)
            else:
                ranges.append((length + first, length + last))
        texts.append(part)
        length += len(part)
    return UserText("".join(texts), ranges)


def str_join(parts: Iterable[object]) -> UserText:
    """Jinja's `~`."""
    return concat(map(text_of, parts))


def text_of(value: object) -> str:
    """The text that a template writes for a value."""
    return value if isinstance(value, str) else str(result_of(str(value), value))


def mark_text(value: Any) -> Any:
    """A value of a request, its texts and its objects' keys marked as the request's. Other values stay as they are."""
    if isinstance(value, str):
        return value if isinstance(value, UserText) else UserText(value)
    if isinstance(value, Mapping):
        return {mark_text(key): mark_text(each) for key, each in value.items()}
    return [mark_text(each) for each in value] if isinstance(value, list | tuple) else value


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without HTML escapes, unlike Jinja's own filter; all strings in it are the request's."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return UserText(
        text, [(found.start() + 1, found.end() - 1) for found in _JSON_STRING.finditer(text) if len(found[0]) > 2]
    )


def track_text(function: F, *, is_exact: bool) -> F:
    """A filter of templates; if it makes text of anything but constants, all of the text is the request's.

    is_exact: it uses only methods of `UserText`, so a `UserText` that it returns has the right ranges.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if is_exact or not isinstance(result, str):
            return result_of(result, *args, *kwargs.values())
        return result_of(str.__getitem__(result, slice(None)), *args, *kwargs.values())

    return call  # type: ignore[return-value]


def result_of(result: Any, *values: Any) -> Any:
    """What a function has returned for `values`; all of a text that is not a `UserText` is the request's, unless the
    values are constants."""
    return UserText(result) if type(result) is str and any(map(_may_be_user, values)) else result


def _may_be_user(value: object) -> bool:
    """Whether a value may have text of the request in it."""
    if isinstance(value, UserText):
        return bool(value._ranges)
    return not (value is None or isinstance(value, str | int | float | Undefined))
