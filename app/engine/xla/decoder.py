"""The decoder as one pure function in plain JAX: memory and arrays in, new memory, tokens and logits out.

In: weights, adapter tables, KV memory and a packed step, all arguments. Out: the KV memory (donated, so written in
place), the most likely token and the logits of each sampled row. Layers run under `lax.scan`: a program's size and
compile time do not grow with depth. Products, deltas and attention are a form's (`operations`); KV memory and tables
are indexed by layer, never sliced or copied.

Tensor parallel: the same function runs in every shard. q, k, v, gate and up are split on the output, o and down on the
input, with one sum over shards after each of the latter. A LoRA delta is added before that sum (A of o and down is
split like the input, B like the output), scales and shifts after it: adapters add no communication.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from app.engine.models.products import Product
from app.engine.xla.arrays import TENSOR_AXIS, AdapterPlaces, KvMemory, RankTables, StepResult, XlaWeights
from app.engine.xla.operations import Operations
from app.engine.xla.sizes import XlaSizes
from app.engine.xla.step import Bucket, XlaStep, unpack


def forward(
    weights: XlaWeights, tables: RankTables, places: AdapterPlaces, kv: KvMemory, flat: Array, *, bucket: Bucket,
    sizes: XlaSizes, operations: Operations,
) -> tuple[KvMemory, StepResult]:  # fmt: skip
    """Run every layer over a packed step. With several shards, call it inside `shard_map` over `TENSOR_AXIS`."""
    step = unpack(flat, bucket)
    decoder = _Decoder(weights, tables, places, step, bucket, sizes, operations)

    def run_layer(state: tuple[Array, KvMemory], layer: Array) -> tuple[Any, None]:
        hidden, kv = state
        attended, kv = decoder.attend(hidden, kv, layer)
        hidden = hidden + decoder.linear(attended, layer, "o")[0]
        hidden = hidden + decoder.linear(decoder.gated(hidden, layer), layer, "down")[0]
        return (hidden, kv), None

    start = (decoder.embed(), kv)
    (hidden, kv), _ = lax.scan(run_layer, start, jnp.arange(sizes.num_layers, dtype=jnp.int32))
    logits = decoder.logits(hidden)  # [B, V]
    token_ids = jnp.argmax(logits, axis=1).astype(jnp.int32)
    top = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return kv, StepResult(token_ids, top, logits)


class _Decoder:
    """The parts of one step."""

    def __init__(
        self, weights: XlaWeights, tables: RankTables, places: AdapterPlaces, step: XlaStep, bucket: Bucket,
        sizes: XlaSizes, operations: Operations,
    ) -> None:  # fmt: skip
        self._weights, self._tables, self._places, self._step = weights, tables, places, step
        self._sizes, self._operations = sizes, operations
        self._plan = operations.plan_attention(step.queries, bucket.tokens, bucket.tile)
        self._cos, self._sin = weights.cos[:, step.positions], weights.sin[:, step.positions]  # [ropes, T, D / 2]

    def embed(self) -> Array:
        """[T, H]."""
        weights, token_ids = self._weights, self._step.token_ids
        if weights.embedding is None:
            return self._operations.columns(weights.head, 0, token_ids)
        rows: Array = weights.embedding[token_ids]
        return rows

    def attend(self, hidden: Array, kv: KvMemory, layer: Array) -> tuple[Array, KvMemory]:
        """[T, H] -> what was attended [T, heads * D], and the memory with the rows' keys and values."""
        layers, step = self._weights.layers, self._step
        q, k, v = self.linear(self._norm(hidden, layers.attention_norm[layer]), layer, "qkv")
        q, k = (self._rotated(rows, norm, layer) for rows, norm in ((q, layers.q_norm), (k, layers.k_norm)))
        return self._operations.store_and_attend(
            q, k, v, kv, step.queries, self._plan, layer, layers.scale[layer], layers.window[layer]
        )

    def gated(self, hidden: Array, layer: Array) -> Array:
        """[T, H] -> act(gate) * up of the normed rows [T, I]."""
        mlp = self._sizes.spec.layers[0].mlp
        gate, up = self.linear(self._norm(hidden, self._weights.layers.mlp_norm[layer]), layer, "gate_up")
        return (jax.nn.gelu(gate, approximate=True) if mlp.activation == "gelu_tanh" else jax.nn.silu(gate)) * up

    def logits(self, hidden: Array) -> Array:
        """[T, H] -> [B, V] of the sampled rows."""
        rows = self._norm(hidden[self._step.sample_rows], self._weights.final_norm)
        logits = self._operations.product(rows, self._weights.head, 0, self._step.num_samples)
        if self._sizes.num_shards > 1:
            logits = lax.all_gather(logits, TENSOR_AXIS, axis=1, tiled=True)
        return logits[:, : self._sizes.spec.vocab_size]

    def linear(self, x: Array, layer: Array, name: str) -> tuple[Array, ...]:
        """One base product for the whole batch, with all that the batch's adapters do to it: [T, d_out] per target."""
        layers, step, product = self._weights.layers, self._step, self._sizes.product(name)
        y = self._operations.product(x, layers.products[name], layer, step.num_tokens)
        a, b = ([table[target] for target in product.targets] for table in (self._tables.a, self._tables.b))
        y = self._operations.add_deltas(x, y, a, b, layer, step.segments, self._places.starts, self._places.ranks[name])
        if product.kind.split == "input" and self._sizes.num_shards > 1:
            y = lax.psum(y, TENSOR_AXIS)
        if layers.biases[name] is not None:
            y = y + layers.biases[name][layer]
        y = self._scaled(y, layer, product)
        columns = (product.columns(target, self._sizes.column_multiple) for target in product.targets)
        return tuple(y[:, mine] for mine in columns)

    def _scaled(self, y: Array, layer: Array, product: Product) -> Array:
        """scale * y + shift, with each row's adapter's own; y itself in a step without such adapters."""
        if product.name not in self._tables.scales:
            return y
        scales, shifts, rows = (
            self._tables.scales[product.name],
            self._tables.shifts[product.name],
            self._step.extra_rows,
        )

        def change(y: Array) -> Array:
            return scales[layer, rows] * y + shifts[layer, rows]

        changed: Array = lax.cond(self._step.num_extra_tokens > 0, change, lambda y: y, y)
        return changed

    def _rotated(self, rows: Array, norms: Array | None, layer: Array) -> Array:
        """Rows [T, heads * D] normalised by head (Qwen3) and rotated: half-split layout (Su et al. 2021)."""
        heads = rows.reshape(len(rows), -1, self._sizes.attention.head_dim)
        if norms is not None:
            heads = self._norm(heads, norms[layer])
        rope = self._weights.layers.rope[layer]
        cos, sin = self._cos[rope][:, None], self._sin[rope][:, None]  # [T, 1, D / 2]
        first, second = jnp.split(heads, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(rows.shape)

    def _norm(self, x: Array, weight: Array) -> Array:
        """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019)."""
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self._sizes.spec.norm_eps) * weight
