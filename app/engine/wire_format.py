"""Values that travel between processes are pickled by the names of their fields.

In: classes of frozen values (dataclasses, named tuples). Out: the same classes, whose pickles hold values by name.
Python pickles a dataclass with slots, and a named tuple, by position: a process whose class has other fields would take
one for another. Here it raises TypeError, and a field that its sender does not have takes its default. Processes that
could not understand each other have different numbers (`app.deployments.rpc.transport`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def message(cls: C) -> C:
    """Have the instances of a dataclass, or of a named tuple, pickled by name. Subclasses are messages of their own."""
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
    """The message. The name of this function is in every pickle: it stays."""
    return cls(**values)
