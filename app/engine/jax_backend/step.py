"""A step's arrays in one of a few fixed shapes.

In: a `ForwardBatch`. Out: the smallest `Bucket` that holds it and one flat int32 vector: a program has one
input per step besides its memory, so calling it costs one transfer. `pack` runs on the host, `unpack` inside
the program; both read the same table of fields. Padding tokens write their K and V nowhere, see no key and
have no adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from jax import Array
from numpy.typing import NDArray

from app.engine.batch import ForwardBatch
from app.kernels.sgmv._jax import Segments, max_segments, segment_arrays

A = TypeVar("A", NDArray[np.int32], Array)

#: Queries per attention tile when some sequence computes more than one token.
PREFILL_TILE = 16


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A program's shape: at most `tokens` tokens of at most `sequences` sequences.

    `tile` queries share an attention tile; 1 (or 2) when every sequence computes one token. `table_width`
    is the length of a block table.
    """

    tokens: int
    sequences: int
    tile: int
    table_width: int

    @property
    def num_tiles(self) -> int:
        """Enough tiles for any division of the tokens among the sequences."""
        if self.tile < PREFILL_TILE:
            return self.tokens
        return self.tokens // self.tile + self.sequences

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each array, in the order they are packed."""
        return {
            "token_ids": (self.tokens,),
            "positions": (self.tokens,),
            "kv_slots": (self.tokens,),
            "tile_rows": (self.num_tiles, self.tile),
            "tile_sequences": (self.num_tiles,),
            "visible": (self.num_tiles, self.tile),
            "token_places": (self.tokens,),
            "block_tables": (self.sequences, self.table_width),
            "sample_rows": (self.sequences,),
            "segments": (4, max_segments(self.tokens, self.sequences)),
            "num_segments": (),
        }

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        return sum(math.prod(shape) for shape in self.fields.values())


class Step(NamedTuple):
    """token_ids, positions, kv_slots: [T]. tile_rows: [W, Q] token rows. tile_sequences: [W]. visible: [W, Q].

    token_places: [T], a token's place among the W * Q queries. block_tables: [B, N]. sample_rows: [B].
    """

    token_ids: Array
    positions: Array
    kv_slots: Array
    tile_rows: Array
    tile_sequences: Array
    visible: Array
    token_places: Array
    block_tables: Array
    sample_rows: Array
    segments: Segments


def pack(
    batch: ForwardBatch, bucket: Bucket, num_kv_slots: int, row_starts: NDArray[np.int32], ranks: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The batch as one vector; row_starts, ranks: [S] per adapter slot, rank 0 for the base."""
    flat = np.zeros(bucket.size, np.int32)
    views = _views(flat, bucket)
    count, num_sequences = len(batch.token_ids), len(batch.seq_lens)
    views["token_ids"][:count] = batch.token_ids
    views["positions"][:count] = batch.positions
    views["kv_slots"][:] = num_kv_slots
    views["kv_slots"][:count] = batch.kv_slots
    views["block_tables"][:num_sequences, : batch.block_tables.shape[1]] = batch.block_tables
    views["sample_rows"][: len(batch.sample_rows)] = batch.sample_rows
    tile = bucket.tile
    lengths = np.diff(batch.query_starts)
    tiles_of = -(-lengths // tile)
    first_tile = np.concatenate([[0], np.cumsum(tiles_of)])
    sequence_of = np.repeat(np.arange(num_sequences), lengths)
    within = np.arange(count) - batch.query_starts[sequence_of]
    places = (first_tile[sequence_of] + within // tile) * tile + within % tile
    views["token_places"][:count] = places
    views["tile_rows"].reshape(-1)[places] = np.arange(count)
    views["visible"].reshape(-1)[places] = batch.positions + 1
    views["tile_sequences"][: first_tile[-1]] = np.repeat(np.arange(num_sequences), tiles_of)
    views["num_segments"][...] = segment_arrays(
        batch.run_starts, batch.run_adapter_slots, row_starts, ranks, views["segments"]
    )
    return flat


def unpack(flat: Array, bucket: Bucket) -> Step:
    """The vector as arrays, inside a program."""
    views = _views(flat, bucket)
    segments = Segments(views.pop("num_segments"), *views.pop("segments"))
    return Step(segments=segments, **views)


def _views(flat: A, bucket: Bucket) -> dict[str, A]:
    views: dict[str, A] = {}
    start = 0
    for name, shape in bucket.fields.items():
        end = start + math.prod(shape)
        views[name] = flat[start:end].reshape(shape)
        start = end
    return views
