"""How frozen values travel between processes: by Ray as pickles by field name, to our own child processes as JSON.

Python pickles a dataclass with slots, and a named tuple, by position: a process whose class has other fields would read
wrong values. A `message` class pickles values by name: an unknown field raises TypeError, and a missing one takes its
default. Processes that could not understand each other have different numbers in `app.deployments.rpc.transport`.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def message(cls: C) -> C:
    """Pickle the instances of a dataclass or a named tuple by name. Subclasses need the decorator themselves."""
    names = message_fields(cls)

    def reduce(self: Any) -> tuple[Callable[..., Any], tuple[type, dict[str, Any]]]:
        return _restore, (cls, {name: getattr(self, name) for name in names})

    cls.__reduce__ = reduce  # type: ignore[assignment]
    return cls


def message_fields(cls: type) -> tuple[str, ...]:
    """The names of a message's fields, in order."""
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls))
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    return names


def _restore(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the message. This function's name is in every pickle, so it must not change."""
    return cls(**values)


def to_plain(value: Any) -> Any:
    """A dataclass or named tuple as a list of its fields, which JSON represents; the opposite of `from_plain`.

    Equal ones in one tuple, as a model's layers are, travel once: the tuple is [unique values, indices].
    """
    if _has_fields(value):
        return [to_plain(getattr(value, name)) for name in message_fields(type(value))]
    if isinstance(value, tuple) and value and _has_fields(value[0]):
        index_of = {each: index for index, each in enumerate(dict.fromkeys(value))}
        return [[to_plain(each) for each in index_of], [index_of[each] for each in value]]
    if isinstance(value, tuple | frozenset):
        return list(value)
    return str(value) if isinstance(value, Path) else value


@functools.cache
def from_plain(kind: Any) -> Callable[[Any], Any]:
    """The function that builds a `kind` from what `to_plain` made of one."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _has_fields(kind):
        hints = typing.get_type_hints(kind)
        builders = [from_plain(hints[name]) for name in message_fields(kind)]
        return lambda values: kind(*[build(value) for build, value in zip(builders, values, strict=True)])
    if origin in (types.UnionType, typing.Union):  # X | None
        build = from_plain(args[0])
        return lambda value: None if value is None else build(value)
    if origin is tuple and _has_fields(args[0]):
        build = from_plain(args[0])

        def build_tuple(value: Any) -> Any:
            unique, indices = value or ((), ())
            built = [build(each) for each in unique]
            return tuple(built[index] for index in indices)

        return build_tuple
    if origin in (tuple, frozenset):
        return typing.cast("Callable[[Any], Any]", origin)
    return Path if kind is Path else lambda value: value


def _has_fields(value: Any) -> bool:
    """Whether this is a dataclass or a named tuple, or one of their instances."""
    return is_dataclass(value) or hasattr(value, "_fields")
