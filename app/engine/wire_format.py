"""Pickling by field name for frozen values that travel between processes.

Python pickles a dataclass with slots, and a named tuple, by position: a process whose class has other fields would read
wrong values. A `message` class pickles values by name: an unknown field raises TypeError, and a missing one takes its
default. Processes that could not understand each other have different numbers in `app.deployments.rpc.transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
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
