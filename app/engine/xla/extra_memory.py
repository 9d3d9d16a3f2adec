"""One flat memory of float32 per device for what adapters hold beside rank rows, written and moved in place.

In: arrays of an adapter slot, and their end. Out: the memory, an argument of programs, and where arrays lie. It has a
fixed size and is donated to the two programs that change it. With several shards each has its part of every array, at
the same place. Float 0 belongs to nobody: a place of 0 means that there is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.errors import ConfigError
from app.engine.xla.arrays import TENSOR_AXIS
from app.engine.xla.extra_runs import ExtraRuns, Move

Floats = NDArray[np.float32]

#: Floats that are written or moved at a time.
_PIECE = 1 << 16


class ExtraMemory:
    """The array, which of its floats are taken, and the programs."""

    def __init__(self, max_bytes: int, read_beyond: int, mesh: Mesh) -> None:
        """max_bytes: for adapters, on every device. read_beyond: floats after an array that programs may read.

        Raises ConfigError for more than 32-bit indices can reach.
        """
        beyond = max(_PIECE, read_beyond)
        self._num_shards, self._mesh = mesh.shape[TENSOR_AXIS], mesh
        self._per_shard = 1 + max_bytes // 4 + beyond
        if self._per_shard >= 1 << 31:
            raise ConfigError(
                f"engine.adapter_extra_bytes is {max_bytes} but in this form of the JAX engine 32-bit indices reach "
                f"{4 * ((1 << 31) - beyond - 2)}; lower it"
            )
        self._runs = ExtraRuns(max_bytes // 4)
        self._sharding = NamedSharding(mesh, P(TENSOR_AXIS))
        self.array: Array = jax.device_put(np.zeros(self._num_shards * self._per_shard, np.float32), self._sharding)
        self._programs: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Compile what `write` calls."""
        self._program("write")
        self._program("move")

    def write(self, adapter_slot: int, arrays: Sequence[Floats]) -> tuple[list[int], list[Move]]:
        """Write a slot's arrays [shards, n]. Returns the place of each, and what was moved to make room.

        Raises AdapterTooLarge if there is no room for them.
        """
        sizes = [array.shape[1] for array in arrays]
        start, moves = self._runs.take(adapter_slot, sum(sizes))
        for move in moves:
            self.array = self._program("move")(self.array, *np.array(move[1:], np.int32))
        places = np.cumsum([start, *sizes[:-1]]).tolist()
        for count, piece in _pieces(arrays, self._num_shards):
            self.array = self._program("write")(self.array, piece, np.int32(start), np.int32(count))
            start += count
        return places, moves

    def release(self, adapter_slot: int) -> None:
        """Free what the slot holds, if it holds anything."""
        self._runs.release(adapter_slot)

    def _program(self, name: str) -> Any:
        if name not in self._programs:
            number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(self._mesh, P()))
            memory = jax.ShapeDtypeStruct(self.array.shape, np.float32, sharding=self._sharding)
            piece = jax.ShapeDtypeStruct((self._num_shards * _PIECE,), np.float32, sharding=self._sharding)
            run, others = (_write, (piece, number, number)) if name == "write" else (_move, (number, number, number))
            if self._num_shards > 1:
                specs = (P(TENSOR_AXIS), *(other.sharding.spec for other in others))
                run = jax.shard_map(run, mesh=self._mesh, in_specs=specs, out_specs=P(TENSOR_AXIS), check_vma=False)
            jitted = jax.jit(run, donate_argnums=(0,), out_shardings=self._sharding)
            self._programs[name] = jitted.lower(memory, *others).compile()
        return self._programs[name]


def _write(memory: Array, piece: Array, at: Array, count: Array) -> Array:
    """The first `count` floats of `piece`, at `at`."""
    before = lax.dynamic_slice(memory, (at,), (_PIECE,))
    return lax.dynamic_update_slice(memory, jnp.where(jnp.arange(_PIECE) < count, piece, before), (at,))


def _move(memory: Array, source: Array, target: Array, size: Array) -> Array:
    """`size` floats down from `source` to `target`, first things first: the two may overlap."""

    def one(number: Array, memory: Array) -> Array:
        first = number * _PIECE
        return _write(memory, lax.dynamic_slice(memory, (source + first,), (_PIECE,)), target + first, size - first)

    return lax.fori_loop(0, -(-size // _PIECE), one, memory)


def _pieces(arrays: Sequence[Floats], num_shards: int) -> Iterator[tuple[int, Floats]]:
    """The arrays [shards, n] one after the other, `_PIECE` floats of each shard at a time, and how many are real."""
    piece, filled = np.zeros((num_shards, _PIECE), np.float32), 0
    for array in arrays:
        at = 0
        while at < array.shape[1]:
            count = min(_PIECE - filled, array.shape[1] - at)
            piece[:, filled : filled + count] = array[:, at : at + count]
            at, filled = at + count, filled + count
            if filled == _PIECE:
                yield filled, piece.reshape(-1)
                piece, filled = np.zeros((num_shards, _PIECE), np.float32), 0  # JAX may keep the one before
    if filled:
        yield filled, piece.reshape(-1)
