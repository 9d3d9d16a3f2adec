"""The decoder's operations in plain XLA: for GPUs and TPUs, and on a CPU for comparison; deltas in Pallas if wanted.

Every product over rows contracts both last axes, and sums are products with ones: in that form XLA's CPU products
give a row the same bits for any number of rows from two on.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from app.engine.adapters.lora import TARGETS
from app.engine.xla.arrays import TENSOR_AXIS, KvMemory, XlaTables
from app.engine.xla.sizes import GROUPS, ROW_PARALLEL, Sizes
from app.engine.xla.step import Step, Tiles
from app.engine.xla.weights import Weights
from app.kernels.extras import xla as extras
from app.kernels.extras.cpu import ATTENTION_NORM, K_NORM, MLP_NORM, Q_NORM
from app.kernels.extras.xla import OwnSegments
from app.kernels.paged_attention.xla import paged_attention
from app.kernels.sgmv.pallas import lora_delta
from app.kernels.sgmv.xla import RANK_CHUNK, add_deltas


class XlaForm:
    """Operations of one step."""

    def __init__(self, weights: Weights, tables: XlaTables, step: Step, sizes: Sizes) -> None:
        assert isinstance(step.attention, Tiles)
        self._weights, self._step, self._sizes = weights, step, sizes
        self._rows, self._own = tables
        self._tiles = step.attention
        self._block_tables = step.block_tables[self._tiles.tile_sequences]  # [W, N]

    def embed(self, token_ids: Array) -> Array:
        rows: Array = self._weights.embedding[token_ids]
        if self._own is None:
            return rows
        return extras.own_embedding(rows, token_ids, self._tiles.embed_places, self._own, self._tiles.own_segments)

    def qkv(self, hidden: Array, layer: Array) -> Array:
        """[T, H] -> [T, d_out]: q, k and v of the normed rows, side by side."""
        return self._linear(self._layer_norm(hidden, layer, ATTENTION_NORM), layer, "qkv")

    def add_o(self, hidden: Array, attended: Array, layer: Array) -> Array:
        """[T, H], with o of what was attended [T, heads * D] added."""
        return hidden + self._linear(attended, layer, "o")

    def gated(self, hidden: Array, layer: Array) -> Array:
        """[T, H] -> [T, mlp_size]: act(gate) * up of the normed rows."""
        sizes = self._sizes
        wide = self._linear(self._layer_norm(hidden, layer, MLP_NORM), layer, "gate_up")
        gate, up = wide[:, : sizes.mlp_size], wide[:, sizes.mlp_size :]
        return (jax.nn.gelu(gate, approximate=True) if sizes.gelu else jax.nn.silu(gate)) * up

    def add_down(self, hidden: Array, gated: Array, layer: Array) -> Array:
        """[T, H], with down of the gated rows [T, mlp_size] added."""
        return hidden + self._linear(gated, layer, "down")

    def attend(self, qkv: Array, kv: KvMemory, layer: Array) -> tuple[Array, KvMemory]:
        """Rotate, store keys and values, attend. Returns [T, heads * D] and the memory."""
        layers, sizes, tiles = self._weights.layers, self._sizes, self._tiles
        q, k, v = self._split_heads(qkv, layer)
        kv = KvMemory(_store(kv.keys, k, layer, self._step), _store(kv.values, v, layer, self._step))
        attended = paged_attention(
            q[tiles.tile_rows], *kv, layer, self._block_tables, tiles.visible, layers.scale[layer], layers.window[layer]
        )
        return attended.reshape(-1, sizes.heads * sizes.head_dim)[tiles.token_places], kv

    def _split_heads(self, qkv: Array, layer: Array) -> tuple[Array, Array, Array]:
        """q [T, heads, D], k and v [T, kv_heads, D]; q and k normalised (Qwen3) and rotated."""
        sizes, weights, positions = self._sizes, self._weights, self._step.positions
        dim, q_end = sizes.head_dim, sizes.heads * sizes.head_dim
        k_end = q_end + sizes.kv_heads * dim
        q = qkv[:, :q_end].reshape(-1, sizes.heads, dim)
        k = qkv[:, q_end:k_end].reshape(-1, sizes.kv_heads, dim)
        v = qkv[:, k_end:].reshape(-1, sizes.kv_heads, dim)
        if sizes.qk_norm:
            q, k = self._layer_norm(q, layer, Q_NORM), self._layer_norm(k, layer, K_NORM)
        rope = weights.layers.rope[layer]
        cos, sin = weights.cos[rope, positions][:, None], weights.sin[rope, positions][:, None]  # [T, 1, D / 2]
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def logits(self, hidden: Array, sample_rows: Array) -> Array:
        """hidden states [T, H] -> [B, V] of the sampled rows."""
        weights, samples, x = self._weights, self._tiles.own_samples, hidden[sample_rows]
        places = None if self._own is None else self._own.slots[:, extras.FINAL_NORM]
        normed = self._norm(x, weights.final_norm, places, samples)
        logits = _matmul(normed, weights.embedding if weights.head is None else weights.head)
        if self._own is None:
            return logits
        first = 0 if self._sizes.num_shards == 1 else lax.axis_index(TENSOR_AXIS) * logits.shape[1]
        return extras.own_logits(normed, logits, self._own, first, samples)

    def _layer_norm(self, x: Array, layer: Array, kind: int) -> Array:
        """x [T, ..., W] normalised with the base's or an adapter's norm of that kind in the layer."""
        layers = self._weights.layers
        weights = (layers.attention_norm, layers.mlp_norm, layers.q_norm, layers.k_norm)[kind]
        places = None if self._own is None else self._own.norms[layer, :, kind]
        return self._norm(x, weights[layer], places, self._tiles.own_segments)

    def _norm(self, x: Array, weight: Array, own_places: Array | None, segments: OwnSegments) -> Array:
        norm = partial(_rms_norm, eps=self._sizes.eps, ones=self._weights.ones)
        if self._own is None or own_places is None:
            return norm(x, weight)
        return extras.own_norm(x, norm(x, weight), weight, self._own.memory, own_places, segments, norm)

    def _linear(self, x: Array, layer: Array, group: str) -> Array:
        """One base product for the whole batch, with the deltas of every adapter in it: [T, d_in] -> [T, d_out]."""
        layers = self._weights.layers
        y, biases = _matmul(x, getattr(layers, group)[layer]), getattr(layers, f"{group}_bias")
        y = self._add_deltas(x, y, layer, group)
        is_part = group in ROW_PARALLEL and self._sizes.num_shards > 1
        if is_part:
            y = lax.psum(self._own_modules(x, y, layer, group), TENSOR_AXIS)
        y = y if biases is None else y + biases[layer]
        return y if is_part else self._own_modules(x, y, layer, group)

    def _own_modules(self, x: Array, y: Array, layer: Array, group: str) -> Array:
        """y with the rows changed whose adapters have scales, shifts or whole modules of the product."""
        if self._own is None:
            return y
        modules, outputs = [TARGETS.index(target) for target in GROUPS[group]], self._sizes.group_outputs[group]
        return extras.own_modules(x, y, self._own, layer, modules, outputs, self._tiles.own_segments)

    def _add_deltas(self, x: Array, y: Array, layer: Array, group: str) -> Array:
        """y with the deltas of x added, for the rows of each adapter."""
        a, b = getattr(self._rows, f"a_{group}"), getattr(self._rows, f"b_{group}")
        segments, outputs = self._tiles.segments, self._sizes.group_outputs[group]
        if self._sizes.form == "xla" or not a.shape[1]:
            return add_deltas(x, y, a, b, layer, segments, outputs)
        a_parts = jnp.split(a[layer], len(outputs), axis=1)
        b_parts = jnp.split(b[layer], np.cumsum(outputs)[:-1], axis=1)
        num_chunks, interpret = a.shape[1] // RANK_CHUNK, self._sizes.interpret
        deltas = [
            lora_delta(x, *parts, segments, num_chunks, interpret=interpret)
            for parts in zip(a_parts, b_parts, strict=True)
        ]
        return y + jnp.concatenate(deltas, axis=1)


def _matmul(x: Array, w: Array) -> Array:
    """x: [T, d_in], w: [d_out, d_in]."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _rms_norm(x: Array, weight: Array, eps: float, ones: Array) -> Array:
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019).

    The sum is a product with ones (an argument, or XLA would turn it back into a sum): XLA's sums depend on the
    number of rows in their last bit.
    """
    width = x.shape[-1]
    square = (x * x).reshape(-1, width)
    total = _matmul(square, ones[:, :width])[:, :1].reshape(*x.shape[:-1], 1)
    return x * lax.rsqrt(total / width + eps) * weight


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, half-split layout (Su et al. 2021). x: [T, heads, D]."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _store(memory: Array, rows: Array, layer: Array, step: Step) -> Array:
    """Write rows [T, kv_heads, D] into memory [L, blocks, kv_heads, block_size, D]; padding lands nowhere."""
    block_size = memory.shape[3]
    blocks, offsets = step.kv_slots // block_size, step.kv_slots % block_size
    return memory.at[layer, blocks, :, offsets].set(rows, mode="drop", unique_indices=False)
