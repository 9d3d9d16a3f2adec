"""What travels between the processes of this release, written down so that the next one can be held to it.

`python -m tests.deployments.links.released.keep` writes `messages.json`: for every message the names of its fields and
a pickle, for every call its parameters. It is run when a release is made, and when `PROTOCOL` is raised; before the
first release also whenever a message changes.
"""

from __future__ import annotations

import base64
import enum
import inspect
import json
import pickle
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from app.deployments.links.protocol import PROTOCOL
from app.deployments.placement.service import PlacementService
from app.deployments.replica.deployment import EngineReplica
from app.deployments.store.service import StoreService
from app.deployments.store.shared import SharedAdapter
from app.deployments.tenants.service import TenantsService
from app.engine.errors import NotReady
from app.engine.message import message_fields
from app.engine.request import TokenChunk

KEPT = Path(__file__).with_name("messages.json")

#: Whose methods other processes call.
SERVICES = (StoreService, TenantsService, PlacementService, EngineReplica)
#: What no method names: frames are bytes, and a store answers with what its actor makes of weights.
UNNAMED = (TokenChunk, SharedAdapter)


def calls() -> dict[str, str]:
    """The parameters of every call between processes, those with a default in brackets."""
    return {
        f"{service.__name__}.{name}": " ".join(
            parameter.name if parameter.default is parameter.empty else f"[{parameter.name}]"
            for parameter in inspect.signature(method).parameters.values()
        )
        for service in SERVICES
        for name, method in _public(service)
    }


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


def messages() -> dict[str, type]:
    return {name_of(kind): kind for kind in travelling() if not issubclass(kind, enum.Enum)}


def enums() -> dict[str, str]:
    return {
        name_of(kind): " ".join(str(item.value) for item in kind)
        for kind in travelling()
        if issubclass(kind, enum.Enum)
    }


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def required(kind: type) -> list[str]:
    """The names of the fields that have no default."""
    if is_dataclass(kind):
        return [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    return [name for name in message_fields(kind) if name not in defaults]


def sample(kind: type, names: Collection[str] | None = None) -> Any:
    """One value of a message; with `names` only these fields are set."""
    hints = typing.get_type_hints(kind)
    return kind(**{n: _sample(n, hints[n]) for n in message_fields(kind) if names is None or n in names})


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


def keep() -> dict[str, Any]:
    """All of it, as JSON keeps it."""
    return {
        "protocol": PROTOCOL,
        "calls": calls(),
        "enums": enums(),
        "messages": {
            name: {
                "fields": " ".join(message_fields(kind)),
                "required": " ".join(required(kind)),
                "pickle": base64.b64encode(pickle.dumps(sample(kind), 5)).decode(),
            }
            for name, kind in messages().items()
        },
    }


if __name__ == "__main__":
    KEPT.write_text(json.dumps(keep(), indent=1) + "\n")
