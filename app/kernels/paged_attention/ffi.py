"""Attention on the CPU inside XLA programs: the write of keys and values, and paged attention, as one call.

In: rotated rows, the KV memory of all layers, a step's queries. Out: what was attended, and the memory, in place: keys
and values are written and read where they lie. Rows of no task are not defined.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array

from app.kernels.paged_attention.cpu import paged_attention, store_rows
from app.kernels.paged_attention.xla import Queries
from app.kernels.xla_call import Floats1, Floats2, Floats5, Ints1, Ints2, KernelCall, Number, Real, reader, team_of


class _Operands(NamedTuple):
    layer: Number
    num_rows: Number
    num_tasks: Number
    window: Number
    scale: Real
    sinks: Floats1
    q: Floats2
    k: Floats2
    v: Floats2
    keys: Floats5
    values: Floats5
    kv_slots: Ints1
    tasks: Ints2
    query_starts: Ints1
    seq_lens: Ints1
    block_tables: Ints2


class _Results(NamedTuple):
    attended: Floats2
    keys: Floats5
    values: Floats5


_NO_CAP = np.float32(0.0)
_operands, _results = reader(_Operands), reader(_Results, after=_Operands)


def _store_and_attend(record: int) -> None:
    given, found, team = _operands(record), _results(record), team_of(record)
    n, keys, values = given.num_rows, found.keys[given.layer], found.values[given.layer]
    head_dim = given.k.shape[1] // keys.shape[1]
    store_rows(team, 0, given.k[:n], given.v[:n], given.kv_slots, head_dim, keys, values)
    paged_attention(
        team, 1, given.q[:n], head_dim, given.scale, given.window, _NO_CAP, given.sinks,
        given.tasks[: given.num_tasks], given.query_starts, given.seq_lens, given.block_tables, keys, values,
        found.attended[:n],
    )  # fmt: skip


_call = KernelCall(
    "store_and_attend", _Operands, _Results, _store_and_attend, {"keys": "keys", "values": "values"}
)  # fmt: skip


def store_and_attend(
    q: Array, k: Array, v: Array, keys: Array, values: Array, queries: Queries, layer: Array, scale: Array,
    window: Array, sinks: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Write k and v to their places; then softmax(scale * q K^T) V over the keys that each query sees.

    q: [T, heads * D]; k, v: [T, kv_heads * D]. keys: [L, blocks, kv_heads, D', block_size], values: [L, blocks,
    kv_heads, block_size, D'], D' = D rounded up to 16. layer, window (0 is none): int32; scale: float32;
    sinks: [heads], or [0] for none. Returns what was attended [T, heads * D], and keys and values in the memory of
    those given.
    """
    operands = _Operands(
        layer, queries.num_rows, queries.num_tasks, window, scale, sinks, q, k, v, keys, values, queries.kv_slots,
        queries.tasks, queries.query_starts, queries.seq_lens, queries.block_tables,
    )  # fmt: skip
    attended, new_keys, new_values = _call(operands, (q.shape, keys.shape, values.shape))
    return attended, new_keys, new_values
