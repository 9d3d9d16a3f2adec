"""Derived adapters: what the store makes of adapters that it holds.

In: a composition, and the packed adapters that are its parts. Out: the packed adapter that is their combination. Rule:
nothing is read here, and the parts stay as they are. The arithmetic is `app.engine.adapters.composing`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from app.engine.adapters.composing.compose import compose
from app.engine.adapters.composing.composition import Composition
from app.engine.adapters.isolation.packing import PackedAdapter, pack_adapter, unpack_adapter
from app.engine.models.spec import ModelSpec

H = TypeVar("H")


class DerivedAdapters(Generic[H]):
    """A `store.Compose` for adapters of one base. `held` gives what `put` has put; it is called in threads."""

    def __init__(self, spec: ModelSpec, held: Callable[[H], PackedAdapter]) -> None:
        self._spec = spec
        self._held = held

    def __call__(self, composition: Composition, parts: Sequence[H]) -> PackedAdapter:
        """Raises CompositionRefused."""
        packed = [self._held(part) for part in parts]
        adapters = [unpack_adapter(one.header, one.arrays) for one in packed]
        return pack_adapter(compose(composition, adapters, self._spec))
