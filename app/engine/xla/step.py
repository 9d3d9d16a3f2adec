"""A step's arrays in one of a few fixed shapes.

In: a `ForwardBatch`. Out: the smallest `Bucket` that holds it and one flat int32 vector: a program has one
input per step besides its memory, so calling it costs one transfer. `pack` runs on the host, `unpack` inside
the program; both read the same table of fields. In the CPU form calls are told how many rows are real; in the others
padding tokens write their K and V nowhere and see no key. They have no adapter in any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax import Array
from numpy.typing import NDArray

from app.engine.batch import ForwardBatch
from app.kernels.extras.xla import OwnSegments
from app.kernels.linear.ffi import TASK_TOKENS as SHRINK_TOKENS
from app.kernels.paged_attention.ffi import TASK_TOKENS, attention_tasks
from app.kernels.sgmv.xla import Segments, max_segments

A = TypeVar("A", NDArray[np.int32], Array)

#: Writes what a step's adapters are into the fields of its bucket.
FillAdapters = Callable[[ForwardBatch, dict[str, NDArray[np.int32]]], None]

#: Numbers of a step in the CPU form.
_COUNTS = (
    "num_tasks", "num_tokens", "num_samples", "num_runs", "num_shrink_tasks", "num_extra_runs", "num_extra_samples",
    "widest",
)  # fmt: skip

#: Queries per attention tile when some sequence computes more than one token.
PREFILL_TILE = 16


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A program's shape: at most `tokens` tokens of at most `sequences` sequences.

    `tile` queries share an attention tile; 1 (or 2) when every sequence computes one token. `table_width`
    is the length of a block table. `is_cpu`: for the CPU form, whose attention has no tiles of a fixed shape.
    """

    tokens: int
    sequences: int
    tile: int
    table_width: int
    is_cpu: bool = False

    @property
    def num_tiles(self) -> int:
        """Enough tiles for any division of the tokens among the sequences."""
        if self.tile < PREFILL_TILE:
            return self.tokens
        return self.tokens // self.tile + self.sequences

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each array, in the order they are packed."""
        kind: dict[str, tuple[int, ...]] = {
            "tile_rows": (self.num_tiles, self.tile),
            "tile_sequences": (self.num_tiles,),
            "visible": (self.num_tiles, self.tile),
            "token_places": (self.tokens,),
            "segments": (4, max_segments(self.tokens, self.sequences)),
            "num_segments": (),
            "own_segments": (3, max_segments(self.tokens, self.sequences)),
            "num_own_segments": (),
            "own_samples": (3, max_segments(self.sequences, self.sequences)),
            "num_own_samples": (),
            "embed_places": (self.tokens,),
        }
        if self.is_cpu:
            kind = {
                "query_starts": (self.sequences + 1,),
                "seq_lens": (self.sequences,),
                "tasks": (self.tokens // TASK_TOKENS + self.sequences, 2),
                "runs": (self.sequences, 3),
                "shrink_tasks": (self.tokens // SHRINK_TOKENS + self.sequences, 3),
                "extra_runs": (self.sequences, 3),
                "extra_samples": (self.sequences, 3),
                "extra_slots": (self.tokens,),
                **dict.fromkeys(_COUNTS, ()),
            }
        return {
            "token_ids": (self.tokens,),
            "positions": (self.tokens,),
            "kv_slots": (self.tokens,),
            "block_tables": (self.sequences, self.table_width),
            "sample_rows": (self.sequences,),
            **kind,
        }

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        return sum(math.prod(shape) for shape in self.fields.values())


class Tiles(NamedTuple):
    """Queries in tiles of one sequence each. tile_rows: [W, Q] token rows. tile_sequences: [W]. visible: [W, Q].

    token_places: [T], a token's place among the W * Q queries. segments: tokens of one adapter each; own_segments,
    own_samples: tokens, and sampled rows, of one adapter with extras each. embed_places: [T], for `own_embedding`.
    """

    tile_rows: Array
    tile_sequences: Array
    visible: Array
    token_places: Array
    segments: Segments
    own_segments: OwnSegments
    own_samples: OwnSegments
    embed_places: Array


class Rows(NamedTuple):
    """What the CPU form's calls are told; of each list, how many lines are real.

    query_starts: [B + 1]. seq_lens: [B]. tasks: [J, 2]. num_tokens, num_samples: rows. The rest is of adapters:
    `app.kernels.linear.ffi.Adapted`.
    """

    query_starts: Array
    seq_lens: Array
    tasks: Array
    runs: Array
    shrink_tasks: Array
    extra_runs: Array
    extra_samples: Array
    extra_slots: Array
    num_tasks: Array
    num_tokens: Array
    num_samples: Array
    num_runs: Array
    num_shrink_tasks: Array
    num_extra_runs: Array
    num_extra_samples: Array
    widest: Array


class Step(NamedTuple):
    """token_ids, positions, kv_slots: [T]. block_tables: [B, N]. sample_rows: [B]. attention: `Tiles` or `Rows`."""

    token_ids: Array
    positions: Array
    kv_slots: Array
    block_tables: Array
    sample_rows: Array
    attention: Tiles | Rows


def pack(batch: ForwardBatch, bucket: Bucket, num_kv_slots: int, fill_adapters: FillAdapters) -> NDArray[np.int32]:
    """The batch as one vector."""
    flat = np.zeros(bucket.size, np.int32)
    views = _views(flat, bucket)
    count, num_sequences = len(batch.token_ids), len(batch.seq_lens)
    views["token_ids"][:count] = batch.token_ids
    views["positions"][:count] = batch.positions
    views["kv_slots"][:] = num_kv_slots
    views["kv_slots"][:count] = batch.kv_slots
    views["block_tables"][:num_sequences, : batch.block_tables.shape[1]] = batch.block_tables
    views["sample_rows"][: len(batch.sample_rows)] = batch.sample_rows
    fill_adapters(batch, views)
    if bucket.is_cpu:
        views["query_starts"][: num_sequences + 1] = batch.query_starts
        views["seq_lens"][:num_sequences] = batch.seq_lens
        views["num_tasks"][...] = attention_tasks(batch.query_starts, views["tasks"])
        views["num_tokens"][...] = count
        views["num_samples"][...] = len(batch.sample_rows)
    else:
        _pack_tiles(batch, bucket, views)
    return flat


def _pack_tiles(batch: ForwardBatch, bucket: Bucket, views: dict[str, NDArray[np.int32]]) -> None:
    count, num_sequences, tile = len(batch.token_ids), len(batch.seq_lens), bucket.tile
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


def unpack(flat: Array, bucket: Bucket) -> Step:
    """The vector as arrays, inside a program."""
    views: dict[str, Any] = _views(flat, bucket)
    if not bucket.is_cpu:
        views["segments"] = Segments(views.pop("num_segments"), *views["segments"])
        for name in ("own_segments", "own_samples"):
            views[name] = OwnSegments(views.pop(f"num_{name}"), *views[name])
    kind = Rows if bucket.is_cpu else Tiles
    attention = kind(**{name: views.pop(name) for name in kind._fields})
    return Step(attention=attention, **views)


def _views(flat: A, bucket: Bucket) -> dict[str, A]:
    views: dict[str, A] = {}
    start = 0
    for name, shape in bucket.fields.items():
        end = start + math.prod(shape)
        views[name] = flat[start:end].reshape(shape)
        start = end
    return views
