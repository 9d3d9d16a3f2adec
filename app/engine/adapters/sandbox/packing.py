"""An adapter as one array and a small header, for sharing between processes.

Ray's object store maps a large NumPy array into every process of a machine without a copy, but each object costs time,
so hundreds of matrices travel as one. Unpacked weights are read-only views of the array; a matrix used twice (the A of
a fused module) is stored once. Unlike a file, the header comes from this program and is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import BFLOAT16, LoraAdapter, LoraKey, LoraPair, Matrix, TokenRows
from app.engine.adapters.card import AdapterCard

#: Every matrix starts at a multiple of this many bytes: a cache line, and the widest vectors' alignment.
_ALIGNMENT = 64
_DTYPES = {"F32": np.dtype(np.float32), "BF16": BFLOAT16}


class PackedAdapter(NamedTuple):
    """A header of plain values (JSON represents all of it) and one flat array of bytes."""

    header: dict[str, Any]
    arrays: list[NDArray[np.uint8]]

    @property
    def card(self) -> AdapterCard:
        card = self.header["card"]
        tuples = {name: tuple(card[name]) for name in ("targets", "invocation_tokens")}
        return AdapterCard(**card | tuples)

    @property
    def contents(self) -> PackedAdapter:
        """Without what `AdapterCard.digest` does not cover and each registration has for itself."""
        texts = {"text": "", "description": "", "metadata": ""}
        return PackedAdapter(self.header | {"card": self.header["card"] | texts}, self.arrays)


def _zeros(num_bytes: int) -> NDArray[np.uint8]:
    return np.zeros(num_bytes, np.uint8)


def pack_adapter(adapter: LoraAdapter, allocate: Callable[[int], NDArray[np.uint8]] = _zeros) -> PackedAdapter:
    """Copy the weights into one array. `allocate` returns the memory for a number of bytes: zeros, aligned to 16 or
    more.
    """
    flat = _Flat()
    header = {
        "card": asdict(adapter.card),
        "weights": [(*key, *map(flat.place, pair)) for key, pair in adapter.weights.items()],
        "magnitudes": [(*key, flat.place(values)) for key, values in adapter.magnitudes.items()],
        "delta_biases": [(*key, flat.place(values)) for key, values in adapter.delta_biases.items()],
        "outer": [(name, *map(flat.place, pair)) for name, pair in adapter.outer.items()],
        "replaced": [(name, flat.place(values)) for name, values in adapter.replaced.items()],
        "scales": [(*key, scale) for key, scale in adapter.scales.items()],
        "outer_scales": dict(adapter.outer_scales),
        "token_rows": [(name, ids, flat.place(rows)) for name, (ids, rows) in adapter.token_rows.items()],
    }
    return PackedAdapter(header, [flat.join(allocate)])


def unpack_adapter(header: Mapping[str, Any], arrays: Sequence[NDArray[np.uint8]]) -> LoraAdapter:
    """The adapter; its weights are views of `arrays[0]`, nothing is copied."""
    (flat,) = arrays
    views: dict[tuple[Any, ...], Matrix] = {}

    def view(fields: Sequence[Any]) -> Matrix:
        place = tuple(fields)
        if place not in views:
            start, dtype, *shape = place
            end = start + _DTYPES[dtype].itemsize * math.prod(shape)
            views[place] = flat[start:end].view(_DTYPES[dtype]).reshape(shape)
            views[place].setflags(write=False)
        return views[place]

    return LoraAdapter(
        PackedAdapter(dict(header), list(arrays)).card,
        MappingProxyType({LoraKey(*key): LoraPair(view(a), view(b)) for *key, a, b in header["weights"]}),
        MappingProxyType({LoraKey(*key): view(place) for *key, place in header["magnitudes"]}),
        MappingProxyType({LoraKey(*key): view(place) for *key, place in header["delta_biases"]}),
        MappingProxyType({name: LoraPair(view(a), view(b)) for name, a, b in header["outer"]}),
        MappingProxyType({name: view(place) for name, place in header["replaced"]}),
        MappingProxyType({name: TokenRows(tuple(ids), view(place)) for name, ids, place in header["token_rows"]}),
        MappingProxyType({LoraKey(*key): scale for *key, scale in header["scales"]}),
        MappingProxyType(dict(header["outer_scales"])),
    )


class _Flat:
    """Arrays laid end to end, each once and aligned. A place is (first byte, dtype, *shape)."""

    def __init__(self) -> None:
        self._size = 0
        self._starts: dict[int, int] = {}
        self._arrays: list[Matrix] = []  # referenced, so that their ids stay unique

    def place(self, array: Matrix) -> tuple[int | str, ...]:
        if id(array) not in self._starts:
            self._starts[id(array)] = self._size
            self._arrays.append(array)
            self._size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return (self._starts[id(array)], "BF16" if array.dtype == BFLOAT16 else "F32", *array.shape)

    def join(self, allocate: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        flat = allocate(self._size)
        for array in self._arrays:
            start = self._starts[id(array)]
            flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        return flat
