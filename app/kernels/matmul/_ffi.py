"""Products on the CPU inside XLA programs: `_cpu.matmul` as a custom call.

In: activations and packed weights of all layers. Out: the products of the first `num_rows` rows; what the others
hold is not defined. So padding costs nothing, and a row has the same bits in any company (`_cpu`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import PANEL, matmul, pack
from app.kernels.xla_call import args_of, buffer, floats, leave_record, register, size, task, team_of


def packed_size(num_columns: int) -> int:
    """Columns of a packed weight: whole panels."""
    return -(-num_columns // PANEL) * PANEL


def packed(w: NDArray[np.float32]) -> NDArray[np.float32]:
    """w: [N, K] -> [packed_size(N), K], whose memory holds the panels [P, K, 16] of `_cpu.pack`."""
    return pack(w).reshape(-1, w.shape[1])


def embedding_rows(w: Array, token_ids: Array) -> Array:
    """Rows [T, K] of the matrix that was `packed` into w [N', K]."""
    panels = w.reshape(-1, w.shape[1], PANEL)
    rows: Array = panels[token_ids // PANEL, :, token_ids % PANEL]
    return rows


def product(x: Array, w: Array, layer: Array | int, num_rows: Array) -> Array:
    """x: [T, K]; w: [L, N', K] packed; num_rows: scalar int32, at most T. Returns [T, N'] = x @ w[layer].T."""
    scalars = jnp.stack([jnp.int32(layer), num_rows])
    call = jax.ffi.ffi_call(_target()[0], jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32))
    out: Array = call(scalars, x, w)
    return out


@cache
def _target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _multiply(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_matmul", register("polylora_matmul", run)


@compiled
def _multiply(team, args):
    """scalars: layer, rows. Buffers: x, w, out."""
    layer, num_rows, depth, num_columns = args[0], args[1], size(args, 0, 1), size(args, 1, 1)
    x = floats(buffer(args, 0), (num_rows, depth))
    w = floats(buffer(args, 1) + layer * num_columns * depth * 4, (num_columns // PANEL, depth, PANEL))
    matmul(team, 0, x, w, floats(buffer(args, 2), (num_rows, num_columns)), False)
