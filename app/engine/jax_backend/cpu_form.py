"""The decoder's operations on a CPU: the project's kernels, called from the XLA program.

The kernels compute the rows that are real and no others, so padding costs next to nothing and a row has the same
bits in any company, by construction. What lies in padding rows is not defined and never read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from app.engine.jax_backend.arrays import AdapterTables, KvMemory
from app.engine.jax_backend.sizes import Sizes
from app.engine.jax_backend.step import Rows, Step
from app.engine.jax_backend.weights import Weights
from app.kernels.matmul._ffi import embedding_rows, product
from app.kernels.paged_attention._ffi import paged_attention
from app.kernels.rows._ffi import Heads, rms_norm, rotate_and_store
from app.kernels.sgmv._ffi import add_deltas


class CpuForm:
    """Operations of one step; the same methods as `XlaForm`."""

    def __init__(self, weights: Weights, tables: AdapterTables, step: Step, sizes: Sizes) -> None:
        assert isinstance(step.attention, Rows)
        self._weights, self._tables, self._step, self._sizes = weights, tables, step, sizes
        self._rows = step.attention

    def embed(self, token_ids: Array) -> Array:
        weights = self._weights
        if weights.embedding is None:
            return embedding_rows(weights.head, token_ids)
        rows: Array = weights.embedding[token_ids]
        return rows

    def norm(self, x: Array, weights: Array, layer: Array) -> Array:
        return rms_norm(x, weights, layer, self._sizes.eps, self._rows.num_tokens)

    def product(self, x: Array, layer: Array, group: str) -> Array:
        return product(x, getattr(self._weights.layers, group), layer, self._rows.num_tokens)

    def add_deltas(self, x: Array, y: Array, layer: Array, group: str) -> Array:
        a, b = getattr(self._tables, f"a_{group}"), getattr(self._tables, f"b_{group}")
        outputs = self._sizes.group_outputs[group]
        return add_deltas(x, y, a, b, layer, self._step.segments, self._rows.widest, outputs)

    def attend(self, qkv: Array, kv: KvMemory, layer: Array) -> tuple[Array, KvMemory]:
        weights, layers, step, rows, sizes = self._weights, self._weights.layers, self._step, self._rows, self._sizes
        heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_dim)
        qkv, keys, values = rotate_and_store(
            qkv, *kv, step.positions, step.kv_slots, weights.cos, weights.sin, layers.q_norm, layers.k_norm, layer,
            layers.rope[layer], sizes.eps, rows.num_tokens, heads,
        )  # fmt: skip
        attended = paged_attention(
            qkv, keys, values, layer, rows.tasks, rows.num_tasks, rows.query_starts, rows.seq_lens, step.block_tables,
            layers.scale[layer], layers.window[layer], sizes.heads, sizes.head_dim,
        )  # fmt: skip
        return attended, KvMemory(keys, values)

    def logits(self, x: Array) -> Array:
        weights, count = self._weights, self._rows.num_samples
        first = jnp.int32(0)
        normed = rms_norm(x, weights.final_norm[None], first, self._sizes.eps, count)
        return product(normed, weights.head[None], first, count)
