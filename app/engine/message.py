"""Values that travel between processes are pickled by the names of their fields.

In: classes of frozen values (dataclasses, named tuples). Out: the same classes, whose pickles processes of another
release read: a field that only the sender knows is dropped, and one that only the reader knows takes its default.
Python pickles a dataclass with slots, and a named tuple, by position: there a new field shifts the others. Rule: a
message keeps its module, its name and the names of its fields, a new field has a default, and a required field stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
T = TypeVar("T")


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


def with_known(cls: Callable[..., T], names: Collection[str], values: Mapping[str, Any]) -> T:
    """`cls` made with those of `values` that it knows: others are of a newer release. Raises TypeError for too few."""
    return cls(**{name: value for name, value in values.items() if name in names})


def _restore(cls: type, values: Mapping[str, Any]) -> Any:
    """The message, from what its sender knew of it. The name of this function is in every pickle: it stays."""
    try:
        return cls(**values)
    except TypeError:  # the sender is of another release
        return with_known(cls, message_fields(cls), values)
