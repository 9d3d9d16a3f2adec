"""The decoder as one pure function: memory and arrays in, new memory, tokens and logits out.

In: weights, adapter tables, KV memory and a packed step, all arguments. Out: the KV memory (donated, so written
in place), the greedy token and the logits of each sampled row. Layers run under `lax.scan`: a program's size and
compile time do not grow with depth. KV memory and adapter tables are indexed by layer, never sliced or copied.
What a layer is made of is a form's (`xla_form`, `cpu_form`).

Tensor parallel: the same function runs in every shard. q, k, v, gate and up are split on the output, o and down
on the input, with one sum over shards after each of the latter. A LoRA delta is added before that sum (A of o and
down is split like the input, B like the output), so adapters add no communication.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from app.engine.xla.arrays import TENSOR_AXIS, KvMemory, Outcome
from app.engine.xla.cpu_form import CpuForm
from app.engine.xla.sizes import Sizes
from app.engine.xla.step import Bucket, unpack
from app.engine.xla.weights import Weights
from app.engine.xla.xla_form import XlaForm


def forward(
    weights: Weights, tables: Any, kv: KvMemory, flat: Array, *, bucket: Bucket, sizes: Sizes
) -> tuple[KvMemory, Outcome]:
    """Run every layer over a packed step. With several shards, call it inside `shard_map` over `TENSOR_AXIS`.

    tables: `CpuTables` in the CPU form, else `AdapterTables`.
    """
    step = unpack(flat, bucket)
    form = (CpuForm if sizes.form == "cpu" else XlaForm)(weights, tables, step, sizes)

    def run_layer(state: tuple[Array, KvMemory], layer: Array) -> tuple[Any, None]:
        hidden, kv = state
        attended, kv = form.attend(form.qkv(hidden, layer), kv, layer)  # [T, heads * D]
        hidden = form.add_o(hidden, attended, layer)
        return (form.add_down(hidden, form.gated(hidden, layer), layer), kv), None

    start = (form.embed(step.token_ids), kv)
    (hidden, kv), _ = lax.scan(run_layer, start, jnp.arange(sizes.num_layers, dtype=jnp.int32))
    logits = form.logits(hidden, step.sample_rows)  # [B, V]
    if sizes.num_shards > 1:
        logits = lax.all_gather(logits, TENSOR_AXIS, axis=1, tiled=True)
    logits = logits[:, : sizes.vocab_size]
    return kv, Outcome(None if sizes.form == "cpu" else jnp.argmax(logits, axis=1).astype(jnp.int32), logits)
