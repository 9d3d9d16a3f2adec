"""The operations on a CPU: the kernels that the CPU engine runs, called from XLA programs.

In: arrays. Out: arrays. Weights are the stacks of panels that the CPU engine stores, in float32 or in 8 bits; adapters'
rows and KV memory lie as its kernels read them. The kernels compute real rows only, so padding costs next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from app.engine.config import WeightStorage
from app.engine.models.stacks import StackWriter
from app.engine.xla.arrays import KvMemory
from app.engine.xla.operations import Floats, PackedRows
from app.kernels.latent_attention import ffi as latent_ffi
from app.kernels.machine.simd import GROUP
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.ffi import product
from app.kernels.matmul.quantised import Quantised
from app.kernels.moe_lora.ffi import multiply_groups
from app.kernels.paged_attention.ffi import store_and_attend
from app.kernels.paged_attention.xla import Queries
from app.kernels.sgmv.cpu import RANK_PANEL
from app.kernels.sgmv.ffi import add_deltas
from app.kernels.sgmv.xla import Segments
from app.kernels.xla_call import Helpers


class CpuOperations:
    """See `Operations`."""

    column_multiple = PANEL

    def __init__(self) -> None:
        self._helpers = Helpers(len(os.sched_getaffinity(0)))

    def check_storage(self, storage: WeightStorage) -> None:
        """Each of them is served."""

    def new_stack(self, shape: tuple[int, int, int], storage: WeightStorage, team: Team) -> StackWriter:
        return StackWriter(shape, storage, team)

    def columns(self, stack: Any, layer: Array | int, ids: Array) -> Array:
        panel, column = ids // PANEL, ids % PANEL
        if not isinstance(stack, Quantised):
            return jnp.asarray(stack)[layer, panel, :, column]
        levels, scales, offsets = (jnp.asarray(part)[layer, panel, :, column] for part in stack)  # [n, K], [n, K / 32]
        scales, offsets = (jnp.repeat(part, GROUP, axis=1)[:, : levels.shape[1]] for part in (scales, offsets))
        return scales * levels + offsets

    def product(self, x: Array, stack: Any, layer: Array | int, num_rows: Array) -> Array:
        return product(x, stack, jnp.int32(layer), num_rows)

    def product_by_group(self, x: Array, stack: Any, first: Array, starts: Array) -> Array:
        return multiply_groups(x, stack, first, starts)

    def pack_rows(self, a: Floats, b: Floats) -> PackedRows:
        """a as panels of eight rows, b as panels of sixteen columns: `app.kernels.sgmv.cpu`."""
        rank, d_in = a.shape
        padded = np.zeros((-(-rank // RANK_PANEL) * RANK_PANEL, d_in), np.float32)
        padded[:rank] = a
        panels = padded.reshape(-1, RANK_PANEL, d_in).swapaxes(1, 2)  # [r / 8, d_in, 8]
        return PackedRows(panels, b.reshape(rank, -1, PANEL).swapaxes(0, 1))  # [W / 16, r, 16]

    def add_deltas(
        self, x: Array, y: Array, a: Sequence[Array], b: Sequence[Array], layer: Array, segments: Segments,
        starts: Array, ranks: Array, max_rank: int,
    ) -> Array:  # fmt: skip
        return add_deltas(x, y, a, b, layer, segments, starts, ranks, max_rank)

    def memory_shapes(self, num_blocks: tuple[int, ...], block_size: int, head_dim: int) -> KvMemory:
        width = -(-head_dim // PANEL) * PANEL
        return KvMemory((*num_blocks, width, block_size), (*num_blocks, block_size, width))

    def plan_attention(self, queries: Queries, num_tokens: int, tile: int) -> None:
        """Nothing: the kernel finds a task's rows by itself."""

    def store_and_attend(
        self, q: Array, k: Array, v: Array, kv: KvMemory, queries: Queries, plan: None, layer: Array, scale: Array,
        window: Array, sinks: Array,
    ) -> tuple[Array, KvMemory]:  # fmt: skip
        assert plan is None
        attended, keys, values = store_and_attend(q, k, v, *kv, queries, layer, scale, window, sinks)
        return attended, KvMemory(keys, values)

    def product_by_head(self, x: Array, stack: Any, first: Array, num_rows: Array) -> Array:
        """By groups of rows: a head's real rows one after the other."""
        num_tokens, num_heads, _ = x.shape
        count, row = jnp.maximum(num_rows, 1), jnp.arange(num_tokens * num_heads, dtype=jnp.int32)
        heads = jnp.arange(num_heads + 1, dtype=jnp.int32)
        rows = x[row % count, jnp.minimum(row // count, num_heads - 1)]
        y = multiply_groups(rows, stack, first, heads * num_rows)
        tokens = jnp.minimum(jnp.arange(num_tokens, dtype=jnp.int32), count - 1)
        return y[heads[None, :-1] * count + tokens[:, None]]

    def latent_shape(self, num_blocks: tuple[int, ...], block_size: int, width: int) -> tuple[int, ...]:
        return (*num_blocks, 1, block_size, -(-width // PANEL) * PANEL)

    def store_and_attend_latents(
        self, absorbed: Array, rotated: Array, rows: Array, kv: KvMemory, queries: Queries, plan: None, layer: Array,
        scale: Array,
    ) -> tuple[Array, KvMemory]:  # fmt: skip
        assert plan is None
        attended, latents = latent_ffi.store_and_attend(absorbed, rotated, rows, kv.keys, queries, layer, scale)
        return attended, KvMemory(latents, None)

    def step(self) -> AbstractContextManager[None]:
        return self._helpers.step()

    def close(self) -> None:
        self._helpers.close()
