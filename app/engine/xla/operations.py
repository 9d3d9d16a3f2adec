"""The table of operations: what the decoder leaves to a form of its own.

In: arrays. Out: products, LoRA deltas and paged attention, and how the arrays that they read lie in memory. Everything
else is plain JAX (`decoder`), the same in every form. A form decides nothing and knows no model. Which forms there are
is said in `forms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jax import Array
from numpy.typing import NDArray

from app.engine.config import WeightStorage
from app.engine.xla.arrays import KvMemory
from app.kernels.machine.team import Team
from app.kernels.paged_attention.xla import Queries
from app.kernels.sgmv.xla import Segments

Floats = NDArray[np.float32]
#: Whose arithmetic a program calls: the project's CPU kernels, or XLA's.
FormName = Literal["cpu", "xla"]


class StackBuilder(Protocol):
    """A product's weights of all layers while they are filled."""

    @property
    def stack(self) -> Any: ...

    def store(self, layer: int, first_column: int, w: Floats, /) -> None:
        """Place w [N, K] in columns first_column (a multiple of `column_multiple`) and up of one layer."""
        ...


class PackedRows(NamedTuple):
    """An adapter's rows of one module as the form reads them, to be written from the beginning of its run's memory."""

    a: Floats
    b: Floats


class Operations(Protocol):
    """A form. T tokens of which the first `num_rows` are real; what padding rows hold is never read."""

    #: Columns of each target, logits of a shard and floats of a head in KV memory are rounded up to it.
    column_multiple: int

    def check_storage(self, storage: WeightStorage) -> None:
        """ConfigError for base weights that the form cannot store so."""
        ...

    def new_stack(self, shape: tuple[int, int, int], storage: WeightStorage, team: Team) -> StackBuilder:
        """Room for weights; shape: layers, columns, depth."""
        ...

    def columns(self, stack: Any, layer: Array | int, ids: Array) -> Array:
        """[n, K] float32: the weights of columns ids [n] of one layer."""
        ...

    def product(self, x: Array, stack: Any, layer: Array | int, num_rows: Array) -> Array:
        """x [T, K] times one layer's weights: [T, columns]."""
        ...

    def product_by_group(self, x: Array, stack: Any, first: Array, starts: Array) -> Array:
        """Rows of x [P, K] times the weights of their own group, [P, columns]; rows of no group hold anything.

        Group g has the rows starts[g] to starts[g + 1] and the weights at first + g. starts: [G + 1] int32.
        """
        ...

    def pack_rows(self, a: Floats, b: Floats) -> PackedRows:
        """a: [r, d_in]; b: [r, columns], the module's columns rounded up."""
        ...

    def add_deltas(
        self, x: Array, y: Array, a: Sequence[Array], b: Sequence[Array], layer: Array, segments: Segments,
        starts: Array, ranks: Array, max_rank: int,
    ) -> Array:  # fmt: skip
        """y [T, columns of all modules] with the deltas of x [T, d_in] added; see `app.kernels.sgmv.xla.add_deltas`.

        max_rank: the largest that an adapter may have, a multiple of eight.
        """
        ...

    def memory_shapes(self, num_blocks: tuple[int, ...], block_size: int, head_dim: int) -> KvMemory:
        """Shapes of keys and values; num_blocks: layers, blocks, KV heads."""
        ...

    def plan_attention(self, queries: Queries, num_tokens: int, tile: int) -> Any:
        """What `store_and_attend` of every layer can share; tile: queries of one task."""
        ...

    def store_and_attend(
        self, q: Array, k: Array, v: Array, kv: KvMemory, queries: Queries, plan: Any, layer: Array, scale: Array,
        window: Array, sinks: Array,
    ) -> tuple[Array, KvMemory]:  # fmt: skip
        """Write k and v, attend; see `app.kernels.paged_attention.xla.store_and_attend`."""
        ...

    def product_by_head(self, x: Array, stack: Any, first: Array, num_rows: Array) -> Array:
        """Head h of x [T, N, D] times the weights at first + h: [T, N, columns]."""
        ...

    def latent_shape(self, num_blocks: tuple[int, ...], block_size: int, width: int) -> tuple[int, ...]:
        """Shape of the memory of latents; num_blocks: layers, blocks. width: of a latent and its rotated part."""
        ...

    def store_and_attend_latents(
        self, absorbed: Array, rotated: Array, rows: Array, kv: KvMemory, queries: Queries, plan: Any, layer: Array,
        scale: Array,
    ) -> tuple[Array, KvMemory]:  # fmt: skip
        """Write latents, attend; see `app.kernels.latent_attention.xla.store_and_attend`."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Around the call of a program and the wait for its results."""
        ...

    def close(self) -> None:
        """End the threads, if there are any."""
        ...
