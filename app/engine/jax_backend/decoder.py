"""The decoder as one pure function: memory and arrays in, new memory, tokens and logits out.

In: weights, adapter tables, KV memory and a packed step, all arguments. Out: the KV memory (donated, so written
in place), the greedy token and the logits of each sampled row. Layers run under `lax.scan`: a program's size and
compile time do not grow with depth. KV memory and adapter tables are indexed by layer, never sliced or copied.

Tensor parallel: the same function runs in every shard. q, k, v, gate and up are split on the output, o and down
on the input, with one sum over shards after each of the latter. A LoRA delta is added before that sum (A of o and
down is split like the input, B like the output), so adapters add no communication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from app.engine.jax_backend.sizes import Sizes
from app.engine.jax_backend.step import Bucket, Step, unpack
from app.engine.jax_backend.weights import LayerWeights, Weights
from app.kernels.paged_attention._jax import paged_attention
from app.kernels.sgmv._jax import add_deltas

#: Name of the mesh axis that tensor-parallel shards lie along.
TENSOR_AXIS = "tensor"


class AdapterTables(NamedTuple):
    """Rank rows per product. qkv, gate_up: a [L, R, modules * d_in], b [L, R, shards * d_out]; o, down: a [L, R,
    shards * d_in], b [L, R, d_out].

    Arrays; or, field by field, their shapes or shardings.
    """

    a_qkv: Any
    a_o: Any
    a_gate_up: Any
    a_down: Any
    b_qkv: Any
    b_o: Any
    b_gate_up: Any
    b_down: Any


class KvMemory(NamedTuple):
    """keys, values: [L, blocks, shards * kv_heads, block_size, D]."""

    keys: Any
    values: Any


class Outcome(NamedTuple):
    """token_ids: [B] int32, the largest logit's; logits: [B, V] float32."""

    token_ids: Any
    logits: Any


def forward(
    weights: Weights, tables: AdapterTables, kv: KvMemory, flat: Array, *, bucket: Bucket, sizes: Sizes
) -> tuple[KvMemory, Outcome]:
    """Run every layer over a packed step. With several shards, call it inside `shard_map` over `TENSOR_AXIS`."""
    step = unpack(flat, bucket)
    hidden = weights.embedding[step.token_ids]  # [T, H]
    block_tables = step.block_tables[step.tile_sequences]  # [W, N]
    outputs = sizes.group_outputs

    def product(x: Array, layer: LayerWeights, number: Array, group: str) -> Array:
        """One base product for the whole batch, with the deltas of every adapter in it."""
        y = _matmul(x, getattr(layer, group))
        a, b = getattr(tables, f"a_{group}"), getattr(tables, f"b_{group}")
        bias = getattr(layer, f"{group}_bias")
        if group in ("qkv", "gate_up"):
            y = y if bias is None else y + bias
            return add_deltas(x, y, a, b, number, step.segments, outputs[group])
        y = add_deltas(x, y, a, b, number, step.segments, outputs[group])
        y = y if sizes.num_shards == 1 else lax.psum(y, TENSOR_AXIS)
        return y if bias is None else y + bias

    def run_layer(state: tuple[Array, Array, Array], xs: tuple[Array, LayerWeights]) -> tuple[Any, None]:
        hidden, keys, values = state
        number, layer = xs
        qkv = product(_rms_norm(hidden, layer.attention_norm, sizes.eps, weights.ones), layer, number, "qkv")
        q, k, v = _split_heads(qkv, layer, weights, step, sizes)
        keys, values = _store(keys, k, number, step), _store(values, v, number, step)
        attended = paged_attention(
            q[step.tile_rows], keys, values, number, block_tables, step.visible, layer.scale, layer.window
        )
        attended = attended.reshape(-1, sizes.heads * sizes.head_dim)[step.token_places]  # [T, heads * D]
        hidden = hidden + product(attended, layer, number, "o")
        wide = product(_rms_norm(hidden, layer.mlp_norm, sizes.eps, weights.ones), layer, number, "gate_up")
        gate, up = wide[:, : sizes.mlp_size], wide[:, sizes.mlp_size :]
        gated = (jax.nn.gelu(gate, approximate=True) if sizes.gelu else jax.nn.silu(gate)) * up
        return (hidden + product(gated, layer, number, "down"), keys, values), None

    numbers = jnp.arange(sizes.num_layers, dtype=jnp.int32)
    (hidden, keys, values), _ = lax.scan(run_layer, (hidden, *kv), (numbers, weights.layers))
    sampled = _rms_norm(hidden[step.sample_rows], weights.final_norm, sizes.eps, weights.ones)  # [B, H]
    logits = _matmul(sampled, weights.embedding if weights.head is None else weights.head)
    if sizes.num_shards > 1:
        logits = lax.all_gather(logits, TENSOR_AXIS, axis=1, tiled=True)
    logits = logits[:, : sizes.vocab_size]
    tokens = jnp.argmax(logits, axis=1).astype(jnp.int32)
    return KvMemory(keys, values), Outcome(tokens, logits)


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


def _split_heads(
    qkv: Array, layer: LayerWeights, weights: Weights, step: Step, sizes: Sizes
) -> tuple[Array, Array, Array]:
    """q [T, heads, D], k and v [T, kv_heads, D]; q and k normalised (Qwen3) and rotated."""
    dim, q_end = sizes.head_dim, sizes.heads * sizes.head_dim
    k_end = q_end + sizes.kv_heads * dim
    q = qkv[:, :q_end].reshape(-1, sizes.heads, dim)
    k = qkv[:, q_end:k_end].reshape(-1, sizes.kv_heads, dim)
    v = qkv[:, k_end:].reshape(-1, sizes.kv_heads, dim)
    if sizes.qk_norm:
        q = _rms_norm(q, layer.q_norm, sizes.eps, weights.ones)
        k = _rms_norm(k, layer.k_norm, sizes.eps, weights.ones)
    cos = weights.cos[layer.rope, step.positions][:, None]  # [T, 1, D / 2]
    sin = weights.sin[layer.rope, step.positions][:, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, half-split layout (Su et al. 2021). x: [T, heads, D]."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _store(memory: Array, rows: Array, layer: Array, step: Step) -> Array:
    """Write rows [T, kv_heads, D] into memory [L, blocks, kv_heads, block_size, D]; padding lands nowhere."""
    block_size = memory.shape[3]
    blocks, offsets = step.kv_slots // block_size, step.kv_slots % block_size
    return memory.at[layer, blocks, :, offsets].set(rows, mode="drop", unique_indices=False)
