"""One-row operations on the CPU inside XLA programs: RMS norm; rotary embedding with the KV write. See `_cpu`.

Only the first `num_rows` rows are computed; what the others hold is not defined.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from app.kernels.compiled import compiled
from app.kernels.rows import _cpu
from app.kernels.rows._cpu import _float_from_bits
from app.kernels.xla_call import args_of, buffer, floats, ints, leave_record, register, size, task, team_of


class Heads(NamedTuple):
    """How a row of q, k and v is divided: heads, KV heads, head size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def rms_norm(x: Array, weight: Array, layer: Array | int, eps: float, num_rows: Array) -> Array:
    """x: [T, H]; weight: [L, H]. Returns [T, H] = x / rms(x) * weight[layer] (Zhang & Sennrich 2019)."""
    scalars = jnp.stack([jnp.int32(layer), num_rows, _bits(jnp.float32(eps))])
    out: Array = jax.ffi.ffi_call(_norm_target()[0], jax.ShapeDtypeStruct(x.shape, jnp.float32))(scalars, x, weight)
    return out


def rotate_and_store(
    qkv: Array, keys: Array, values: Array, positions: Array, kv_slots: Array, cos: Array, sin: Array,
    q_norm: Array | None, k_norm: Array | None, layer: Array, rope: Array, eps: float, num_rows: Array, heads: Heads,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Normalise (Qwen3: q_norm, k_norm [L, D]) and rotate q and k; write k and v to memory.

    qkv: [T, W], q, k and v side by side. keys: [L, blocks, kv_heads, D', block_size], values: [L, blocks, kv_heads,
    block_size, D']. positions, kv_slots: [T] int32. cos, sin: [ropes, positions, D / 2]. Returns qkv, keys and values,
    in the memory of those given.
    """
    has_norm = q_norm is not None
    none = jnp.zeros((1, 1), jnp.float32)
    scalars = jnp.stack([layer, num_rows, rope, _bits(jnp.float32(eps)), *(jnp.int32(n) for n in (*heads, has_norm))])
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (qkv, keys, values)]
    call = jax.ffi.ffi_call(_rotate_target()[0], shapes, input_output_aliases={1: 0, 2: 1, 3: 2})
    new_qkv, new_keys, new_values = call(
        scalars, qkv, keys, values, positions, kv_slots, cos, sin,
        none if q_norm is None else q_norm, none if k_norm is None else k_norm,
    )  # fmt: skip
    return new_qkv, new_keys, new_values


def _bits(value: Array) -> Array:
    """A float32 as the int32 with the same bits: scalars of a call are integers."""
    return lax.bitcast_convert_type(value, jnp.int32)


@cache
def _norm_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _normalise(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_rms_norm", register("polylora_rms_norm", run)


@cache
def _rotate_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _rotate_and_store(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_rotate_and_store", register("polylora_rotate_and_store", run)


@compiled
def _normalise(team, args):
    """scalars: layer, rows, eps. Buffers: x, weight, out."""
    layer, num_rows, eps, width = args[0], args[1], _float_from_bits(args[2]), size(args, 0, 1)
    x, out = floats(buffer(args, 0), (num_rows, width)), floats(buffer(args, 2), (num_rows, width))
    _cpu.rms_norm(team, 0, x, floats(buffer(args, 1) + layer * width * 4, (width,)), eps, out)


@compiled
def _rotate_and_store(team, args):
    """scalars: layer, rows, rope, eps, heads, KV heads, head size, has norms. Buffers: qkv, keys, values, positions,
    KV slots, cos, sin, q_norm, k_norm; results, which are the first three."""
    layer, num_rows, rope, eps = args[0], args[1], args[2], _float_from_bits(args[3])
    num_heads, num_kv_heads, head_dim = args[4], args[5], args[6]
    blocks, stored, block_size = size(args, 1, 1), size(args, 1, 3), size(args, 1, 4)
    memory = layer * blocks * num_kv_heads * stored * block_size * 4
    num_positions, half = size(args, 5, 1), size(args, 5, 2)
    turn = rope * num_positions * half * 4
    norm_size = head_dim if args[7] else 0
    norm = layer * norm_size * 4
    _cpu.rotate_and_store(
        team, 0, floats(buffer(args, 0), (num_rows, size(args, 0, 1))),
        ints(buffer(args, 3), (num_rows,)), ints(buffer(args, 4), (num_rows,)),
        floats(buffer(args, 5) + turn, (num_positions, half)), floats(buffer(args, 6) + turn, (num_positions, half)),
        floats(buffer(args, 7) + norm, (norm_size,)), floats(buffer(args, 8) + norm, (norm_size,)), eps,
        floats(buffer(args, 1) + memory, (blocks, num_kv_heads, stored, block_size)),
        floats(buffer(args, 2) + memory, (blocks, num_kv_heads, block_size, stored)),
        num_heads, num_kv_heads, head_dim, num_heads * head_dim, num_kv_heads * head_dim,
    )  # fmt: skip
