"""Paged attention on the CPU inside XLA programs: `_cpu.paged_attention` as a custom call.

Keys and values are read where they lie; nothing is gathered. Rows of no task are not defined.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.paged_attention import _cpu
from app.kernels.rows._cpu import _float_from_bits
from app.kernels.xla_call import args_of, buffer, floats, ints, leave_record, register, size, task, team_of

#: Queries of one task.
TASK_TOKENS = _cpu._TILE_TOKENS


def attention_tasks(query_starts: NDArray[np.int32], out: NDArray[np.int32]) -> int:
    """Fill out [J, 2] with (sequence, first query); returns how many there are."""
    tasks = _cpu.attention_tasks(query_starts)
    out[: len(tasks)] = tasks
    return len(tasks)


def paged_attention(
    q: Array, keys: Array, values: Array, layer: Array, tasks: Array, num_tasks: Array, query_starts: Array,
    seq_lens: Array, block_tables: Array, scale: Array, window: Array, num_heads: int, head_dim: int,
) -> Array:  # fmt: skip
    """softmax(scale * q K^T) V over the keys each query may see.

    q: [T, >= heads * D]. keys: [L, blocks, kv_heads, D', block_size], values: [L, blocks, kv_heads, block_size, D'],
    D' = D rounded up to 16. tasks: [J, 2] and num_tasks, see `attention_tasks`. query_starts: [B + 1]; seq_lens: [B];
    block_tables: [B, N]; all int32. window: 0 is none. Returns [T, heads * D].
    """
    scalars = jnp.stack([layer, num_tasks, jnp.int32(head_dim), window, lax.bitcast_convert_type(scale, jnp.int32)])
    shape = jax.ShapeDtypeStruct((q.shape[0], num_heads * head_dim), jnp.float32)
    out: Array = jax.ffi.ffi_call(_target()[0], shape)(
        scalars, q, keys, values, tasks, query_starts, seq_lens, block_tables
    )
    return out


@cache
def _target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _attend(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_paged_attention", register("polylora_paged_attention", run)


@compiled
def _attend(team, args):
    """scalars: layer, tasks, head size, window, scale. Buffers: q, keys, values, tasks, query starts, lengths, block
    tables, out."""
    layer, num_tasks, head_dim, window, scale = args[0], args[1], args[2], args[3], _float_from_bits(args[4])
    blocks, num_kv_heads, stored, block_size = size(args, 1, 1), size(args, 1, 2), size(args, 1, 3), size(args, 1, 4)
    memory = layer * blocks * num_kv_heads * stored * block_size * 4
    num_tokens = size(args, 0, 0)
    _cpu.paged_attention(
        team, 0, floats(buffer(args, 0), (num_tokens, size(args, 0, 1))), head_dim, scale, window,
        ints(buffer(args, 3), (num_tasks, 2)), ints(buffer(args, 4), (size(args, 4, 0),)),
        ints(buffer(args, 5), (size(args, 5, 0),)), ints(buffer(args, 6), (size(args, 6, 0), size(args, 6, 1))),
        floats(buffer(args, 1) + memory, (blocks, num_kv_heads, stored, block_size)),
        floats(buffer(args, 2) + memory, (blocks, num_kv_heads, block_size, stored)),
        floats(buffer(args, 7), (num_tokens, size(args, 7, 1))),
    )  # fmt: skip
