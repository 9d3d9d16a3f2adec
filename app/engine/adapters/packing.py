"""An adapter as one array and a small header, to be shared between processes.

In: a `LoraAdapter`, or what `pack_adapter` made of one. Out: the other. Ray's object store maps a
large NumPy array into every process of a machine without a copy, but spends time per object, so
hundreds of matrices travel as one. Unpacked weights are read-only views of the array that was given;
a matrix used twice (the A of a fused module) is stored once. Both ends are this program: the header
is trusted, unlike a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.card import AdapterCard
from app.engine.adapters.lora import LoraAdapter, LoraKey, LoraPair

#: Every matrix starts at a multiple of 64 bytes: a cache line, and what the widest vectors want.
_ALIGN_FLOATS = 16


def pack_adapter(adapter: LoraAdapter) -> tuple[dict[str, Any], list[NDArray[np.float32]]]:
    """(header of plain values, [one flat float32 array]). The array is a copy, made once."""
    starts: dict[int, int] = {}
    matrices: list[NDArray[np.float32]] = []
    size = 0
    pairs = []
    for key, pair in adapter.weights.items():
        for matrix in pair:
            if id(matrix) not in starts:
                starts[id(matrix)] = size
                matrices.append(matrix)
                size += -(-matrix.size // _ALIGN_FLOATS) * _ALIGN_FLOATS
        pairs.append([*key, starts[id(pair.a)], *pair.a.shape, starts[id(pair.b)], *pair.b.shape])
    flat = np.zeros(size, np.float32)
    for matrix in matrices:
        start = starts[id(matrix)]
        flat[start : start + matrix.size] = matrix.reshape(-1)
    return {"card": asdict(adapter.card), "pairs": pairs}, [flat]


def unpack_adapter(header: Mapping[str, Any], arrays: Sequence[NDArray[np.float32]]) -> LoraAdapter:
    """The adapter whose weights are views of `arrays[0]`; nothing is copied."""
    (flat,) = arrays
    weights: dict[LoraKey, LoraPair] = {}
    views: dict[int, NDArray[np.float32]] = {}

    def view(start: int, rows: int, columns: int) -> NDArray[np.float32]:
        if start not in views:
            views[start] = flat[start : start + rows * columns].reshape(rows, columns)
            views[start].setflags(write=False)
        return views[start]

    for layer, target, expert, *places in header["pairs"]:
        weights[LoraKey(layer, target, expert)] = LoraPair(view(*places[:3]), view(*places[3:]))
    card = header["card"] | {"targets": tuple(header["card"]["targets"])}
    return LoraAdapter(AdapterCard(**card), MappingProxyType(weights))
