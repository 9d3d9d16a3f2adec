"""The operations in XLA: for GPUs and TPUs, and on a CPU to compare with.

In: arrays. Out: arrays. Weights keep the checkpoint's orientation [d_out, d_in], in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from jax import Array, lax

from app.engine.config import WeightStorage
from app.engine.errors import ConfigError
from app.engine.xla.arrays import KvMemory
from app.engine.xla.operations import Floats, PackedRows
from app.kernels.latent_attention import xla as latent_xla
from app.kernels.machine.team import Team
from app.kernels.moe_lora.xla import multiply_groups
from app.kernels.paged_attention.xla import Queries, Tiles, store_and_attend, tiles_of
from app.kernels.sgmv.xla import Segments, add_deltas


class PlainStack:
    """Weights [layers, columns, depth] as they come."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.stack: Floats = np.zeros(shape, np.float32)

    def store(self, layer: int, first_column: int, w: Floats) -> None:
        """See `StackBuilder.store`."""
        self.stack[layer, first_column : first_column + len(w)] = w


class XlaOperations:
    """See `Operations`."""

    column_multiple = 1

    def check_storage(self, storage: WeightStorage) -> None:
        if storage == "int8":
            raise ConfigError(
                "engine.xla.weight_storage is 'int8' but the form 'xla' keeps float32 weights; set auto or float32, or "
                "on a CPU engine.xla.form: cpu"
            )

    def new_stack(self, shape: tuple[int, int, int], storage: WeightStorage, team: Team) -> PlainStack:  # noqa: ARG002
        return PlainStack(shape)

    def columns(self, stack: Array, layer: Array | int, ids: Array) -> Array:
        return stack[layer, ids]

    def product(self, x: Array, stack: Array, layer: Array | int, num_rows: Array) -> Array:  # noqa: ARG002
        return lax.dot_general(x, stack[layer], (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)

    def product_by_group(self, x: Array, stack: Array, first: Array, starts: Array) -> Array:
        return multiply_groups(x, stack, first, starts)

    def pack_rows(self, a: Floats, b: Floats) -> PackedRows:
        return PackedRows(a, b)

    def add_deltas(
        self, x: Array, y: Array, a: Sequence[Array], b: Sequence[Array], layer: Array, segments: Segments,
        starts: Array, ranks: Array, max_rank: int,  # noqa: ARG002
    ) -> Array:  # fmt: skip
        return add_deltas(x, y, a, b, layer, segments, starts, ranks)

    def memory_shapes(self, num_blocks: tuple[int, ...], block_size: int, head_dim: int) -> KvMemory:
        shape = (*num_blocks, block_size, head_dim)
        return KvMemory(shape, shape)

    def plan_attention(self, queries: Queries, num_tokens: int, tile: int) -> Tiles:
        return tiles_of(queries, num_tokens, tile)

    def store_and_attend(
        self, q: Array, k: Array, v: Array, kv: KvMemory, queries: Queries, plan: Tiles, layer: Array, scale: Array,
        window: Array, sinks: Array,
    ) -> tuple[Array, KvMemory]:  # fmt: skip
        attended, keys, values = store_and_attend(q, k, v, *kv, queries, plan, layer, scale, window, sinks)
        return attended, KvMemory(keys, values)

    def product_by_head(self, x: Array, stack: Array, first: Array, num_rows: Array) -> Array:  # noqa: ARG002
        return latent_xla.multiply_heads(x, stack, first)

    def latent_shape(self, num_blocks: tuple[int, ...], block_size: int, width: int) -> tuple[int, ...]:
        return (*num_blocks, 1, block_size, width)

    def store_and_attend_latents(
        self, absorbed: Array, rotated: Array, rows: Array, kv: KvMemory, queries: Queries, plan: Tiles, layer: Array,
        scale: Array,
    ) -> tuple[Array, KvMemory]:  # fmt: skip
        attended, latents = latent_xla.store_and_attend(absorbed, rotated, rows, kv.keys, queries, plan, layer, scale)
        return attended, KvMemory(latents, None)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""
