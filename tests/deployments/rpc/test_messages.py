"""Whatever travels between processes is pickled by the names of its fields."""

from __future__ import annotations

import enum
import inspect
import pickle
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import pytest

from app.deployments.placement.service import PlacementService
from app.deployments.replica.deployment import EngineReplica
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.tenancy.service import TenantsService
from app.engine.errors import NotReady
from app.engine.wire_format import message, message_fields

#: Whose methods other processes call.
SERVICES = (StoreService, TenantsService, PlacementService, EngineReplica)
#: What no method names: a store answers with what its actor makes of weights. Chunks travel in frames, which are bytes.
UNNAMED = (SharedAdapter,)


def travelling() -> list[type]:
    """Every class of values, and every enumeration, that a call takes or answers with, by its name."""
    found: dict[str, type] = {}
    for service in SERVICES:
        for _, method in _public(service):
            for hint in typing.get_type_hints(method).values():
                _collect(hint, found)
    for kind in UNNAMED:
        _collect(kind, found)
    return [found[name] for name in sorted(found)]


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def sample(kind: type) -> Any:
    """One value of a message."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _sample(name, hints[name]) for name in message_fields(kind)})


def _sample(name: str, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return sample(hint)
    if isinstance(origin, type) and hasattr(origin, "_fields"):
        return sample(origin)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint))
    if isinstance(hint, type) and issubclass(hint, Exception):
        return NotReady(f"a {name}")
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return _sample(name, next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return tuple(_sample(name, arg) for arg in args if arg is not Ellipsis)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_sample(name, args[0]): _sample(name, args[1])}
    if isinstance(origin, type) and issubclass(origin, AbstractSet):
        return frozenset([_sample(name, args[0])])
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [_sample(name, args[0])]
    plain: dict[Any, Any] = {str: f"a {name}", int: 3, float: 2.5, bool: True, bytes: b"\x00salt"}
    return plain.get(hint, f"any {name}")


def _public(service: type) -> Iterator[tuple[str, Any]]:
    for name, method in vars(service).items():
        if not name.startswith("_") and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
            yield name, method


def _collect(hint: Any, found: dict[str, type]) -> None:
    origin = typing.get_origin(hint)
    for part in (origin, *typing.get_args(hint)):
        if part is not None:
            _collect(part, found)
    if not isinstance(hint, type) or origin is not None or name_of(hint) in found:
        return
    if issubclass(hint, enum.Enum):
        found[name_of(hint)] = hint
    elif is_dataclass(hint) or hasattr(hint, "_fields"):
        found[name_of(hint)] = hint
        for inner in typing.get_type_hints(hint).values():
            _collect(inner, found)


MESSAGES = [kind for kind in travelling() if not issubclass(kind, enum.Enum)]


def test_the_walk_sees_what_it_should() -> None:
    assert {"GenerateRequest", "AdapterRef", "SharedAdapter", "CatalogEntry"} <= {kind.__name__ for kind in MESSAGES}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__qualname__)
def test_whatever_travels_is_pickled_by_name(kind: type) -> None:
    value = sample(kind)
    assert kind.__reduce__.__module__ == message.__module__, f"{kind.__qualname__} travels and is no @message"
    again = pickle.loads(pickle.dumps(value))
    assert again == value
    assert type(again) is kind


def test_a_missing_field_has_its_default_and_an_unknown_one_is_refused() -> None:
    @message
    class Point(NamedTuple):
        x: int
        y: int = 7

    rebuild, (kind, values) = Point(1, 2).__reduce__()  # type: ignore[misc]
    assert rebuild(kind, {"x": 1}) == Point(1, 7)
    with pytest.raises(TypeError, match="'z'"):
        rebuild(kind, values | {"z": 3})
    with pytest.raises(TypeError, match="'x'"):
        rebuild(kind, {"y": 1})


def test_a_mistake_in_a_message_is_said() -> None:
    @message
    @dataclass(frozen=True, slots=True)
    class Checked:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise TypeError("x is negative")

    rebuild, (kind, _) = Checked(1).__reduce__()
    with pytest.raises(TypeError, match="negative"):
        rebuild(kind, {"x": -1})
