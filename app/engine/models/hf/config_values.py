"""Checked values of a `config.json`.

A value of the wrong type or range is a `CheckpointError` naming key and value; an absent key has transformers' default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.spec import MAX_SIZE


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of at least 1."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise CheckpointError(f"config key {key!r} is {value!r}; a positive integer up to {MAX_SIZE} is needed")
    return value


def flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config key {key!r} is {value!r}; true or false is needed")
    return value


def layer_indices(config: Mapping[str, Any], key: str) -> frozenset[int]:
    """A list of layer indices; null and an absent key mean an empty one."""
    value = config.get(key)
    found = [] if value is None else value
    if not isinstance(found, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in found):
        raise CheckpointError(f"config key {key!r} is {value!r}; a list of layers' indices is needed")
    return frozenset(found)


def norm_eps(config: Mapping[str, Any], key: str, default: float) -> float:
    """A norm's epsilon, from 0 to 1."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise CheckpointError(f"{key} is {value!r}; a number from 0 to 1 is needed")
    return float(value)
