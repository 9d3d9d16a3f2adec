"""The decoder's operations on a CPU: the project's kernels, called from the XLA program, five times per layer.

The kernels compute the rows that are real and no others, so padding costs next to nothing and a row has the same
bits in any company, by construction. What lies in padding rows is not defined and never read. Hidden states are as
wide as the panels they are written in.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from app.engine.xla.arrays import TENSOR_AXIS, KvMemory
from app.engine.xla.cpu_tables import CpuTables
from app.engine.xla.sizes import Sizes
from app.engine.xla.step import Rows, Step
from app.engine.xla.weights import Weights
from app.kernels.linear import ffi as linear
from app.kernels.paged_attention.ffi import Heads, OwnNorms, Queries, attend


class CpuForm:
    """Operations of one step; the same methods as `XlaForm`."""

    def __init__(self, weights: Weights, tables: CpuTables, step: Step, sizes: Sizes) -> None:
        assert isinstance(step.attention, Rows)
        self._weights, self._step, self._sizes, self._rows = weights, step, sizes, step.attention
        a, b = tables.rows
        rows = step.attention
        self._adapted = linear.Adapted(
            a, b, tables.starts, tables.in_bf16, tables.ranks, tables.extras, rows.runs, rows.num_runs,
            rows.shrink_tasks, rows.num_shrink_tasks, rows.widest, rows.extra_runs, rows.num_extra_runs,
            rows.extra_samples, rows.num_extra_samples, rows.extra_slots, tables.head_inputs,
        )  # fmt: skip

    def embed(self, token_ids: Array) -> Array:
        weights = self._weights
        return linear.embed(
            token_ids, weights.embedding, weights.head, self._adapted, self._rows.num_tokens, self._sizes.hidden_size
        )

    def qkv(self, hidden: Array, layer: Array) -> Array:
        layers = self._weights.layers
        return linear.norm_qkv(
            hidden, layers.attention_norm, layers.qkv, layers.qkv_bias, layer, self._sizes.eps, self._rows.num_tokens,
            self._adapted,
        )  # fmt: skip

    def attend(self, qkv: Array, kv: KvMemory, layer: Array) -> tuple[Array, KvMemory]:
        weights, layers, step, rows, sizes = self._weights, self._weights.layers, self._step, self._rows, self._sizes
        queries = Queries(
            step.positions, step.kv_slots, rows.num_tokens, rows.tasks, rows.num_tasks, rows.query_starts,
            rows.seq_lens, step.block_tables,
        )  # fmt: skip
        q_size, kv_size, _ = sizes.module_widths["qkv"]
        heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_dim, q_size, kv_size)
        own = OwnNorms(self._adapted.ranks, self._adapted.extras, self._adapted.num_extra_runs, self._adapted.slots)
        attended, keys, values = attend(
            qkv, *kv, queries, weights.cos, weights.sin, layers.q_norm, layers.k_norm, layer, layers.rope[layer],
            sizes.eps, layers.scale[layer], layers.window[layer], heads, own,
        )  # fmt: skip
        return attended, KvMemory(keys, values)

    def add_o(self, hidden: Array, attended: Array, layer: Array) -> Array:
        layers = self._weights.layers
        return self._add(hidden, attended, layers.o, layers.o_bias, layer, linear.O_PROJ)

    def gated(self, hidden: Array, layer: Array) -> Array:
        layers, sizes = self._weights.layers, self._sizes
        return linear.norm_gated(
            hidden, layers.mlp_norm, layers.gate_up, layers.gate_up_bias, layer, sizes.eps, self._rows.num_tokens,
            self._adapted, sizes.mlp_size, sizes.gelu,
        )  # fmt: skip

    def add_down(self, hidden: Array, gated: Array, layer: Array) -> Array:
        layers = self._weights.layers
        return self._add(hidden, gated, layers.down, layers.down_bias, layer, linear.DOWN_PROJ)

    def logits(self, hidden: Array, sample_rows: Array) -> Array:
        weights, rows = self._weights, self._rows
        return linear.logits(
            hidden, sample_rows, weights.final_norm, weights.head, self._sizes.eps, rows.num_samples, self._adapted
        )

    def _add(self, hidden: Array, x: Array, w: Array, bias: Array | None, layer: Array, module: int) -> Array:
        count = self._rows.num_tokens
        if self._sizes.num_shards == 1:
            return linear.add_product(hidden, x, w, bias, layer, count, self._adapted, module)
        part = linear.add_product(jnp.zeros_like(hidden), x, w, None, layer, count, self._adapted, module)
        total = hidden + lax.psum(part, TENSOR_AXIS)
        if bias is not None:
            total = total.at[:, : bias.shape[1]].add(bias[layer])
        return total
