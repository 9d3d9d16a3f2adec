"""Metrics that write down what they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import pytest

#: A metric's name, a value, and its tags.
Told = tuple[str, float, dict[str, str]]


def record(monkeypatch: pytest.MonkeyPatch, exported: ModuleType, kinds: Iterable[str]) -> list[Told]:
    """What metrics of `kinds` ("Counter", …) are told that are made in the module `exported` from now on, in order."""
    told: list[Told] = []

    class Recorded:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def inc(self, value: float = 1, tags: Mapping[str, str] | None = None) -> None:
            told.append((self._name, value, dict(tags or {})))

        set = observe = inc

    for kind in kinds:
        monkeypatch.setattr(exported, kind, Recorded)
    return told
