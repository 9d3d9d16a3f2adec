"""A build of the CPU kernels that tells of every tile of every product, run in a process of its own.

In: the name of a model, and how weights are stored. Out: a line of JSON, `Counts`. All products on the CPU are emitted
by two functions of `app.kernels.machine.simd`; here each emits, before a tile's multiply-adds, a call that is told
where the tile reads weights and for how many rows. Nothing else of the kernels is changed. `POLYLORA_CACHE` has to be a
folder of this process' own: the code that is compiled here holds addresses.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import CombinationPart, make_combination
from app.engine.adapters.combining.combine import combine
from app.engine.config import CpuConfig, EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.models.spec import ModelSpec
from app.kernels.machine import simd
from app.kernels.machine.vectors import LANES, WORD
from app.kernels.matmul.int8 import Int8Panels
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter, random_mixture_adapter, with_random_extras
from tests.engine.batch_invariance import dense_spec, grid_tensors, mixture_spec
from tests.seeds import any_seed, rng

SPECS = {"dense": dense_spec, "mixture": mixture_spec}
#: Tokens of a step's pieces: decode steps and prompts.
LENGTHS = (1, 9, 1, 17, 3)


class Tile(NamedTuple):
    """One tile: `rows` rows times `panels` panels; step k reads panel p's weights at w + p * panel_bytes + k * k_bytes.

    expanded: where it leaves its weights in float32 for the tiles behind it, or 0.
    """

    rows: int
    w: int
    k_bytes: int
    panel_bytes: int
    depth: int
    panels: int
    expanded: int


class Counts(NamedTuple):
    """What a step did. met: by product, and by layer (or expert of a layer), the least and the most rows that any of
    its weights was multiplied with. own: multiply-adds with rank rows. tokens, samples: the step's."""

    met: dict[str, list[tuple[int, int]]]
    own: int
    tokens: int
    samples: int


class TileLog:
    """The tiles of all kernels that are compiled while it is in place."""

    def __init__(self) -> None:
        self.tiles: list[Tile] = []
        self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(Tile._fields))(self._add)

    def _add(self, *values: int) -> None:
        self.tiles.append(Tile(*values))

    def put_in_place(self) -> None:
        """Before anything is compiled."""
        emit_tile, emit_bytes_tile = simd._emit_tile, simd._emit_bytes_tile

        def tile(
            builder: Any, rows: Any, counts: Any, panels: int, vectors: int, args: Any, *, in_bf16: bool = False,
            **rest: Any,
        ) -> None:  # fmt: skip
            _, _, w, w_k, w_panel, depth, *_ = args
            size = WORD(2 if in_bf16 else 4)
            strides = builder.mul(w_k, size), builder.mul(w_panel, size)
            self._emit_call(builder, rows, w, *strides, depth, WORD(panels), WORD(0))
            emit_tile(builder, rows, counts, panels, vectors, args, in_bf16=in_bf16, **rest)

        def bytes_tile(
            builder: Any, rows: Any, most_rows: int, args: Any, fetch: Any = None, expanded: Any = None
        ) -> None:
            _, _, levels, _, _, depth, *_ = args
            kept = WORD(0) if expanded is None else expanded
            self._emit_call(builder, rows, levels, WORD(2 * LANES), WORD(0), depth, WORD(1), kept)
            emit_bytes_tile(builder, rows, most_rows, args, fetch, expanded)

        simd._emit_tile, simd._emit_bytes_tile = tile, bytes_tile

    def _emit_call(self, builder: Any, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [WORD] * len(values))
        address = ctypes.cast(self._call, ctypes.c_void_p).value
        builder.call(builder.inttoptr(WORD(address), kind.as_pointer()), values)


def told(tiles: list[Tile]) -> Iterator[Tile]:
    """The tiles, each where its weights lie in the model: those behind one that expands read what it left."""
    behind: Tile | None = None
    for tile in tiles:
        if behind is not None and tile.w == behind.expanded:
            yield behind._replace(rows=tile.rows)
            continue
        behind = tile if tile.expanded else None
        yield tile


def rows_met(tiles: list[Tile], weights: NDArray[Any]) -> NDArray[np.int64]:
    """With how many rows each of the weights [..., 16] was multiplied; [...]."""
    unit, first = weights.strides[-2], weights.ctypes.data
    met = np.zeros(weights.nbytes // unit, np.int64)
    for tile in told(tiles):
        for panel in range(tile.panels):
            at = tile.w + panel * tile.panel_bytes - first
            if 0 <= at < weights.nbytes:
                assert tile.k_bytes == unit, "a panel is read from its beginning to its end"
                met[at // unit : at // unit + tile.depth] += tile.rows
    return met.reshape(weights.shape[:-1])


def multiply_adds(tiles: list[Tile], memory: NDArray[np.uint8]) -> int:
    """Of whole vectors, with what lies in `memory`."""
    first = memory.ctypes.data
    inside = [tile for tile in tiles if 0 <= tile.w - first < memory.nbytes]
    return sum(tile.rows * tile.panels * tile.depth for tile in inside)


def stacks(weights: Any, name: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    """Every product's packed weights [layers, panels, depth, 16], by name; of 8 bits their levels."""
    for field, value in weights._asdict().items():
        if isinstance(value, Int8Panels):
            yield name + field, value.levels
        elif isinstance(value, np.ndarray) and value.ndim == 4:
            yield name + field, value
        elif hasattr(value, "_asdict"):
            yield from stacks(value, f"{field}.")


def adapters_of(spec: ModelSpec) -> list[LoraAdapter]:
    """Three of unequal ranks; one with matrices, norms and rows of its own; and all three of the first at once."""
    generator = rng()
    if any(layer.experts for layer in spec.layers):
        three = [random_mixture_adapter(spec, rank, generator) for rank in (4, 8, 24)]
    else:
        three = [random_adapter(spec, rank, seed=any_seed()) for rank in (3, 16, 40)]
    extras = with_random_extras(random_adapter(spec, 8, DENSE_TARGETS[:2], any_seed()), spec, generator)
    parts = [CombinationPart(AdapterRef(str(n), one.card.digest, "t"), 0.5 + n) for n, one in enumerate(three)]
    combination = make_combination(parts)
    by_digest = {one.card.digest: one for one in three}
    composed = combine(combination, [by_digest[part.ref.digest] for part in combination.parts], spec)
    return [three[0], three[1], extras, composed]


def counted(log: TileLog, spec: ModelSpec, storage: Any) -> Counts:
    """One step of the base, single adapters, and several adapters at once for the longest prompt."""
    cpu = CpuConfig(num_threads=1, weight_dtype=storage)
    config = EngineConfig(cpu=cpu, num_kv_blocks=64, lora_pool_rows=512, max_num_batched_tokens=64)
    backend = CpuBackend(spec, grid_tensors(spec, any_seed()), config)
    at = 0
    for slot, adapter in enumerate(adapters_of(spec), 1):
        backend.write_adapter(slot, at, adapter)
        at += backend.limits.rank_rows_of(adapter)
    generator, width = rng(), -(-max(LENGTHS) // config.block_size)
    lengths = [*LENGTHS[:-1], max(LENGTHS), LENGTHS[-1]]
    pieces = [
        Piece(generator.integers(3, 60, length), 0, np.arange(n * width, (n + 1) * width), min(n, 4))
        for n, length in enumerate(lengths)
    ]
    batch = forward_batch(pieces, config.block_size)
    log.tiles.clear()
    backend.forward(batch)
    met = {}
    for name, stack in stacks(backend._weights):
        rows = rows_met(log.tiles, stack).reshape(len(stack), -1)
        met[name] = [(int(of_one.min()), int(of_one.max())) for of_one in rows if rows.size]
    return Counts(met, multiply_adds(log.tiles, backend._rows.memory), len(batch.token_ids), len(batch.sample_rows))


def main() -> None:
    name, storage = sys.argv[1:]
    log = TileLog()
    log.put_in_place()
    print(json.dumps(counted(log, SPECS[name](), storage)._asdict()))


if __name__ == "__main__":
    main()
