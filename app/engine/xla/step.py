"""A step's arrays in one of a few fixed shapes.

All fields of a `Bucket` lie in one flat int32 vector: a program has one input per step besides its memory, so calling
it costs one transfer. `pack` runs on the host, `unpack` inside the program; both read the same table of fields. The
number of real entries of each list is a field too; padding tokens have no adapter, write K and V nowhere and see no
key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax import Array
from numpy.typing import NDArray

from app.engine.batch import ForwardBatch
from app.kernels.paged_attention.xla import Queries, attention_tasks
from app.kernels.sgmv.xla import Segments, max_segments, segment_lines

A = TypeVar("A", NDArray[np.int32], Array)
Ints = NDArray[np.int32]

#: Queries of one attention task when some sequence computes more than one token.
PREFILL_TILE = 16


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A program's shape: at most `tokens` tokens of at most `sequences` sequences.

    `tile` queries share an attention task: 1 when every sequence computes one token, else `PREFILL_TILE`. `table_width`
    is the length of a block table.
    """

    tokens: int
    sequences: int
    tile: int
    table_width: int

    @property
    def num_tasks(self) -> int:
        """Enough tasks for any division of the tokens among the sequences."""
        return self.tokens if self.tile == 1 else self.tokens // self.tile + self.sequences

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each array, in the order they are packed."""
        return {
            "token_ids": (self.tokens,),
            "positions": (self.tokens,),
            "kv_slots": (self.tokens,),
            "extra_rows": (self.tokens,),
            "expert_slots": (self.tokens,),
            "sample_rows": (self.sequences,),
            "query_starts": (self.sequences + 1,),
            "seq_lens": (self.sequences,),
            "block_tables": (self.sequences, self.table_width),
            "tasks": (self.num_tasks, 2),
            "lines": (max_segments(self.tokens, self.sequences), 3),
            **dict.fromkeys(
                ("num_tokens", "num_tasks", "num_segments", "widest", "num_extra_tokens", "most_pages"),
                (),
            ),
        }

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        return sum(math.prod(shape) for shape in self.fields.values())


class StepAdapters(NamedTuple):
    """A step's adapters.

    widest: the largest rank. extra_rows: [T], each token's row of the tables of scales and shifts. num_extra_tokens:
    number of tokens whose adapters have any. expert_slots: [T], the adapter slots of tokens whose adapters change
    experts, else 0. most_pages: the longest page list of an expert of these adapters.
    """

    widest: int
    extra_rows: Ints
    num_extra_tokens: int
    expert_slots: Ints
    most_pages: int


class XlaStep(NamedTuple):
    """A step inside the program.

    token_ids, positions, extra_rows, expert_slots: [T], of which num_tokens are real. sample_rows: [B].
    """

    token_ids: Array
    positions: Array
    extra_rows: Array
    expert_slots: Array
    sample_rows: Array
    num_tokens: Array
    num_extra_tokens: Array
    most_pages: Array
    queries: Queries
    segments: Segments


def pack(batch: ForwardBatch, bucket: Bucket, num_kv_slots: int, adapters: StepAdapters) -> Ints:
    """Pack the batch into one vector."""
    flat = np.zeros(bucket.size, np.int32)
    views = _views(flat, bucket)
    lists: dict[str, NDArray[Any]] = {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "kv_slots": batch.kv_slots,
        "extra_rows": adapters.extra_rows,
        "expert_slots": adapters.expert_slots,
        "sample_rows": batch.sample_rows,
        "query_starts": batch.query_starts,
        "seq_lens": batch.seq_lens,
        "tasks": attention_tasks(batch.query_starts, bucket.tile),
        "lines": segment_lines(batch.run_starts, batch.run_adapter_slots),
    }
    views["kv_slots"][:] = num_kv_slots
    for name, values in lists.items():
        views[name][: len(values)] = values
    num_sequences, table_width = batch.block_tables.shape
    views["block_tables"][:num_sequences, :table_width] = batch.block_tables
    numbers = {
        "num_tokens": len(batch.token_ids),
        "num_tasks": len(lists["tasks"]),
        "num_segments": len(lists["lines"]),
        "widest": adapters.widest,
        "num_extra_tokens": adapters.num_extra_tokens,
        "most_pages": adapters.most_pages,
    }
    for name, number in numbers.items():
        views[name][...] = number
    return flat


def unpack(flat: Array, bucket: Bucket) -> XlaStep:
    """Unpack the vector into arrays, inside a program."""
    views = _views(flat, bucket)
    segments = Segments(views["lines"], views["num_segments"], views["widest"])
    queries = Queries(
        views["kv_slots"], views["tasks"], views["num_tasks"], views["query_starts"], views["seq_lens"],
        views["block_tables"],
    )  # fmt: skip
    own = XlaStep._fields[: -len(("queries", "segments"))]
    return XlaStep(**{name: views[name] for name in own}, queries=queries, segments=segments)


def _views(flat: A, bucket: Bucket) -> dict[str, A]:
    views: dict[str, A] = {}
    start = 0
    for name, shape in bucket.fields.items():
        end = start + math.prod(shape)
        views[name] = flat[start:end].reshape(shape)
        start = end
    return views
