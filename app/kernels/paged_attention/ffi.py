"""Attention on the CPU inside XLA programs: rotary embedding, the KV write and paged attention as one custom call.

Keys and values are written and read where they lie; nothing is gathered. Rows of no task are not defined.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from app.kernels.extras.cpu import own_rotate_and_store
from app.kernels.extras.ffi import tables_of
from app.kernels.machine.compiled import compiled
from app.kernels.machine.scalars import float_from_bits
from app.kernels.paged_attention import cpu
from app.kernels.rotary.cpu import rotate_and_store
from app.kernels.xla_call import args_of, buffer, floats, ints, leave_record, register, size, task, team_of

#: Queries of one task.
TASK_TOKENS = cpu._TILE_TOKENS


class Heads(NamedTuple):
    """How a row of q, k and v is divided: heads, KV heads, head size; widths of q and of k in the row."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_size: int
    kv_size: int


class Queries(NamedTuple):
    """A step's rows, int32: positions, kv_slots [T], of which num_rows; tasks [J, 2] (`attention_tasks`), of which
    num_tasks; query_starts [B + 1]; seq_lens [B]; block_tables [B, N]."""

    positions: Array
    kv_slots: Array
    num_rows: Array
    tasks: Array
    num_tasks: Array
    query_starts: Array
    seq_lens: Array
    block_tables: Array


class OwnNorms(NamedTuple):
    """Adapters' own norms of heads: ranks [L, S, M], for its sizes; extras, num_extra_runs and slots of `Adapted`."""

    ranks: Array
    extras: Array
    num_extra_runs: Array
    slots: Array


def attention_tasks(query_starts: NDArray[np.int32], out: NDArray[np.int32]) -> int:
    """Fill out [J, 2] with (sequence, first query); returns how many there are."""
    tasks = cpu.attention_tasks(query_starts)
    out[: len(tasks)] = tasks
    return len(tasks)


def attend(
    qkv: Array, keys: Array, values: Array, queries: Queries, cos: Array, sin: Array, q_norm: Array | None,
    k_norm: Array | None, layer: Array, rope: Array, eps: float, scale: Array, window: Array, heads: Heads,
    own: OwnNorms,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Normalise (Qwen3: q_norm, k_norm [L, D]) and rotate q and k; write k and v; softmax(scale * q K^T) V.

    qkv: [T, >= q_size + 2 * kv_size], overwritten. keys: [L, blocks, kv_heads, D', block_size], values: [L, blocks,
    kv_heads, block_size, D'], D' = D rounded up to 16. cos, sin: [ropes, positions, D / 2]. window: 0 is none. Returns
    [T, heads * D], and keys and values in the memory of those given.
    """
    none = jnp.zeros((1, 0), jnp.float32)
    integers = layer, queries.num_rows, queries.num_tasks, rope, window, own.num_extra_runs, *heads
    scalars = jnp.stack([*(jnp.int32(n) for n in integers), _bits(jnp.float32(eps)), _bits(scale)])
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (qkv, keys, values)]
    attended = jax.ShapeDtypeStruct((len(qkv), heads.num_heads * heads.head_dim), jnp.float32)
    call = jax.ffi.ffi_call(_target()[0], [*shapes, attended], input_output_aliases={1: 0, 2: 1, 3: 2})
    _, new_keys, new_values, out = call(
        scalars, qkv, keys, values, queries.positions, queries.kv_slots, queries.tasks, queries.query_starts,
        queries.seq_lens, queries.block_tables, cos, sin, none if q_norm is None else q_norm,
        none if k_norm is None else k_norm, own.ranks, own.extras, own.slots,
    )  # fmt: skip
    return out, new_keys, new_values


def _bits(value: Array) -> Array:
    """A float32 as the int32 with the same bits: scalars of a call are integers."""
    return lax.bitcast_convert_type(value, jnp.int32)


@cache
def _target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _attend(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_attend", register("polylora_attend", run)


@compiled
def _attend(team, args):
    """scalars: layer, rows, tasks, rope, window, runs with extras, `Heads`, eps, scale. Buffers: qkv, keys, values,
    positions, KV slots, tasks, query starts, lengths, block tables, cos, sin, norms of q and k, ranks, extras, slots;
    results: the first three and what was attended."""
    layer, num_rows, num_tasks, rope, window, num_extra_runs = args[0], args[1], args[2], args[3], args[4], args[5]
    num_heads, num_kv_heads, head_dim, q_size, kv_size = args[6], args[7], args[8], args[9], args[10]
    eps, scale = float_from_bits(args[11]), float_from_bits(args[12])
    qkv = floats(buffer(args, 0), (num_rows, size(args, 0, 1)))
    blocks, stored, block_size = size(args, 1, 1), size(args, 1, 3), size(args, 1, 4)
    memory = layer * blocks * num_kv_heads * stored * block_size * 4
    keys = floats(buffer(args, 1) + memory, (blocks, num_kv_heads, stored, block_size))
    values = floats(buffer(args, 2) + memory, (blocks, num_kv_heads, block_size, stored))
    positions, kv_slots = ints(buffer(args, 3), (num_rows,)), ints(buffer(args, 4), (num_rows,))
    num_positions, half = size(args, 9, 1), size(args, 9, 2)
    turn = rope * num_positions * half * 4
    cos = floats(buffer(args, 9) + turn, (num_positions, half))
    sin = floats(buffer(args, 10) + turn, (num_positions, half))
    norm_size = size(args, 11, 1)
    q_norm = floats(buffer(args, 11) + layer * norm_size * 4, (norm_size,))
    k_norm = floats(buffer(args, 12) + layer * norm_size * 4, (norm_size,))
    if num_extra_runs > 0:
        norms = tables_of(buffer(args, 14), size(args, 13, 0), size(args, 13, 1)).norms[layer]
        own_rotate_and_store(
            team, 0, norms, ints(buffer(args, 15), (size(args, 15, 0),)), qkv, positions, kv_slots, cos, sin, q_norm,
            k_norm, eps, keys, values, num_heads, num_kv_heads, head_dim, q_size, kv_size,
        )  # fmt: skip
    else:
        rotate_and_store(
            team, 0, qkv, positions, kv_slots, cos, sin, q_norm, k_norm, eps, keys, values, num_heads, num_kv_heads,
            head_dim, q_size, kv_size,
        )  # fmt: skip
    cpu.paged_attention(
        team, 1, qkv, head_dim, scale, window, ints(buffer(args, 5), (num_tasks, 2)),
        ints(buffer(args, 6), (size(args, 6, 0),)), ints(buffer(args, 7), (size(args, 7, 0),)),
        ints(buffer(args, 8), (size(args, 8, 0), size(args, 8, 1))), keys, values,
        floats(buffer(args, 19), (num_rows, size(args, 19, 1))),
    )  # fmt: skip
