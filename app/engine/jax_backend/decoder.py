"""The decoder as one pure function: memory and arrays in, new memory, tokens and logits out.

In: weights, adapter tables, KV memory and a packed step, all arguments. Out: the KV memory (donated, so written
in place), the greedy token and the logits of each sampled row. Layers run under `lax.scan`: a program's size and
compile time do not grow with depth. KV memory and adapter tables are indexed by layer, never sliced or copied.
Products, norms and attention are a form's (`xla_form`, `cpu_form`).

Tensor parallel: the same function runs in every shard. q, k, v, gate and up are split on the output, o and down
on the input, with one sum over shards after each of the latter. A LoRA delta is added before that sum (A of o and
down is split like the input, B like the output), so adapters add no communication.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from app.engine.jax_backend.arrays import TENSOR_AXIS, AdapterTables, KvMemory, Outcome
from app.engine.jax_backend.cpu_form import CpuForm
from app.engine.jax_backend.sizes import ROW_PARALLEL, Sizes
from app.engine.jax_backend.step import Bucket, unpack
from app.engine.jax_backend.weights import Weights
from app.engine.jax_backend.xla_form import XlaForm


def forward(
    weights: Weights, tables: AdapterTables, kv: KvMemory, flat: Array, *, bucket: Bucket, sizes: Sizes
) -> tuple[KvMemory, Outcome]:
    """Run every layer over a packed step. With several shards, call it inside `shard_map` over `TENSOR_AXIS`."""
    step = unpack(flat, bucket)
    form = (CpuForm if sizes.form == "cpu" else XlaForm)(weights, tables, step, sizes)
    layers = weights.layers

    def product(x: Array, layer: Array, group: str) -> Array:
        """One base product for the whole batch, with the deltas of every adapter in it."""
        y = form.product(x, layer, group)
        biases = getattr(layers, f"{group}_bias")
        if group in ROW_PARALLEL:
            y = form.add_deltas(x, y, layer, group)[:, : sizes.hidden_size]
            y = y if sizes.num_shards == 1 else lax.psum(y, TENSOR_AXIS)
            return y if biases is None else y + biases[layer]
        return form.add_deltas(x, y if biases is None else y + biases[layer], layer, group)

    def run_layer(state: tuple[Array, KvMemory], layer: Array) -> tuple[Any, None]:
        hidden, kv = state
        qkv = product(form.norm(hidden, layers.attention_norm, layer), layer, "qkv")
        attended, kv = form.attend(qkv, kv, layer)  # [T, heads * D]
        hidden = hidden + product(attended, layer, "o")
        wide = product(form.norm(hidden, layers.mlp_norm, layer), layer, "gate_up")
        gate, up = wide[:, : sizes.mlp_size], wide[:, sizes.mlp_size : 2 * sizes.mlp_size]
        gated = (jax.nn.gelu(gate, approximate=True) if sizes.gelu else jax.nn.silu(gate)) * up
        return (hidden + product(gated, layer, "down"), kv), None

    start = (form.embed(step.token_ids), kv)
    (hidden, kv), _ = lax.scan(run_layer, start, jnp.arange(sizes.num_layers, dtype=jnp.int32))
    logits = form.logits(hidden[step.sample_rows])  # [B, V]
    if sizes.num_shards > 1:
        logits = lax.all_gather(logits, TENSOR_AXIS, axis=1, tiled=True)
    logits = logits[:, : sizes.vocab_size]
    return kv, Outcome(None if sizes.form == "cpu" else jnp.argmax(logits, axis=1).astype(jnp.int32), logits)
