"""The decoder on the CPU: one compiled call runs all layers of a step, without the GIL.

In: packed weights, adapter tables, KV memory, a step's arrays. Out: hidden states of the rows that
sample, turned into logits. Everything is a NumPy array; the kernels are `app.kernels`. Weights and
tables of all layers are stacked so that the loop over layers is compiled too.

There is one base product per module and step, whatever adapters the batch holds; deltas are added to it
in place, per run of tokens with one adapter. Base tokens do no adapter work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from app.kernels.compiled import compiled, compiled_parallel
from app.kernels.matmul._quantised import Stack, embed, matmul_layer
from app.kernels.paged_attention._cpu import paged_attention
from app.kernels.rows._cpu import gated_gelu, gated_silu, normalise_row, rms_norm, rotate_and_store
from app.kernels.sgmv._cpu import expand, shrink

Floats = NDArray[np.float32]


class Weights(NamedTuple):
    """Packed weights, layers stacked: L layers, P panels of 16 columns; a `Stack` is float32 or 8 bits.

    qkv and gate_up hold their modules side by side, each padded to whole panels. Biases, q_norm and
    k_norm are `[L, 0]` where the model has none. `embedding` is `[V, H]`, or `[0, H]` if the rows are read
    from `head` `[1, P, H, 16]` (tied). cos, sin: [ropes, positions, rotary / 2]; layer_rope, layer_window: [L].
    """

    embedding: Floats
    head: Stack
    final_norm: Floats
    attention_norm: Floats
    mlp_norm: Floats
    qkv: Stack
    qkv_bias: Floats
    q_norm: Floats
    k_norm: Floats
    out: Stack
    out_bias: Floats
    gate_up: Stack
    gate_up_bias: Floats
    down: Stack
    down_bias: Floats
    cos: Floats
    sin: Floats
    layer_rope: NDArray[np.int64]
    layer_window: NDArray[np.int64]
    scales: Floats


class Sizes(NamedTuple):
    """Integers of the model. q_size, kv_size, mlp_size are padded to whole panels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_size: int
    kv_size: int
    mlp_size: int
    gelu: bool
    eps: np.float32


class AdapterTables(NamedTuple):
    """Rank rows of the seven modules: a as panels [L, R / 8, d_in, 8], b as [L, R, d_out padded to 16].

    row_starts: [S] int64. ranks: [L, S, 7] int32 in the order of `app.engine.adapters.lora.TARGETS`.
    """

    a_q: Floats
    a_k: Floats
    a_v: Floats
    a_o: Floats
    a_gate: Floats
    a_up: Floats
    a_down: Floats
    b_q: Floats
    b_k: Floats
    b_v: Floats
    b_o: Floats
    b_gate: Floats
    b_up: Floats
    b_down: Floats
    row_starts: NDArray[np.int64]
    ranks: NDArray[np.int32]


class Step(NamedTuple):
    """A step's arrays, as in `app.engine.batch.ForwardBatch`, with the kernels' task lists."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    attention_tasks: NDArray[np.int64]
    runs: NDArray[np.int64]
    shrink_tasks: NDArray[np.int64]
    sample_rows: NDArray[np.int32]


class Workspace(NamedTuple):
    """Scratch for the largest step: T rows each, P rows of sampled states and logits.

    hidden, qkv and gate_up are as wide as the panels they are written in (padding included); normed,
    attended, gated and sampled are exactly as wide as the products that read them. shrunk: [T, 3, W].
    """

    hidden: Floats
    normed: Floats
    qkv: Floats
    attended: Floats
    gate_up: Floats
    gated: Floats
    shrunk: Floats
    sampled: Floats
    logits: Floats


@compiled_parallel
def _gather_normed(hidden, rows, weight, eps, out):
    for p in prange(rows.shape[0]):
        normalise_row(hidden[rows[p]], weight, eps, weight.shape[0], out[p])


@compiled
def _fill_rows(out, bias):
    """Start a product from its bias. Returns whether there is one."""
    if bias.shape[0] == 0:
        return False
    for t in range(out.shape[0]):
        for i in range(bias.shape[0]):
            out[t, i] = bias[i]
    return True


@compiled
def _add_rows(out, bias):
    for t in range(out.shape[0] if bias.shape[0] > 0 else 0):
        for i in range(out.shape[1]):
            out[t, i] += bias[i]


@compiled
def forward(weights, sizes, tables, k_memory, v_memory, step, work, num_threads):
    """Run every layer over the step's T tokens; leave the P sampled rows' logits in work.logits.

    k_memory: [L, blocks, kv_heads, D, block_size]; v_memory: [L, blocks, kv_heads, block_size, D]; the step's
    keys and values are written there.
    """
    num_tokens = step.token_ids.shape[0]
    hidden, normed = work.hidden[:num_tokens], work.normed[:num_tokens]
    qkv, attended = work.qkv[:num_tokens], work.attended[:num_tokens]
    gate_up, gated = work.gate_up[:num_tokens], work.gated[:num_tokens]
    shrunk = work.shrunk[:num_tokens]
    runs, row_starts = step.runs, tables.row_starts
    adapted = runs.shape[0] > 0
    q_end, k_end = sizes.q_size, sizes.q_size + sizes.kv_size
    v_end, width = k_end + sizes.kv_size, weights.final_norm.shape[0]
    up_start = sizes.mlp_size

    embed(step.token_ids, weights.embedding, weights.head, hidden[:, :width])
    for layer in range(weights.layer_rope.shape[0]):
        ranks = tables.ranks[layer]
        rms_norm(hidden, weights.attention_norm[layer], sizes.eps, normed)
        start = _fill_rows(qkv, weights.qkv_bias[layer])
        matmul_layer(normed, weights.qkv, layer, qkv, start, num_threads)
        if adapted:
            shrink(
                normed, (tables.a_q[layer], tables.a_k[layer], tables.a_v[layer]), ranks[:, 0:3], step.shrink_tasks,
                row_starts, shrunk,
            )  # fmt: skip
            expand(shrunk[:, 0], tables.b_q[layer], runs, ranks[:, 0], row_starts, qkv[:, :q_end], num_threads)
            expand(shrunk[:, 1], tables.b_k[layer], runs, ranks[:, 1], row_starts, qkv[:, q_end:k_end], num_threads)
            expand(shrunk[:, 2], tables.b_v[layer], runs, ranks[:, 2], row_starts, qkv[:, k_end:v_end], num_threads)
        rope = weights.layer_rope[layer]
        rotate_and_store(
            qkv, step.positions, step.kv_slots, weights.cos[rope], weights.sin[rope], weights.q_norm[layer],
            weights.k_norm[layer], sizes.eps, k_memory[layer], v_memory[layer], sizes.num_heads, sizes.num_kv_heads,
            sizes.head_dim, sizes.q_size, sizes.kv_size,
        )  # fmt: skip
        paged_attention(
            qkv, sizes.head_dim, weights.scales[layer], weights.layer_window[layer], step.attention_tasks,
            step.query_starts, step.seq_lens, step.block_tables, k_memory[layer], v_memory[layer], attended,
        )  # fmt: skip
        # The residual is where the sums of o and down start: no separate addition.
        _add_rows(hidden[:, :width], weights.out_bias[layer])
        matmul_layer(attended, weights.out, layer, hidden, True, num_threads)
        if adapted:
            shrink(attended, (tables.a_o[layer],), ranks[:, 3:4], step.shrink_tasks, row_starts, shrunk)
            expand(shrunk[:, 0], tables.b_o[layer], runs, ranks[:, 3], row_starts, hidden, num_threads)
        rms_norm(hidden, weights.mlp_norm[layer], sizes.eps, normed)
        start = _fill_rows(gate_up, weights.gate_up_bias[layer])
        matmul_layer(normed, weights.gate_up, layer, gate_up, start, num_threads)
        if adapted:
            shrink(
                normed, (tables.a_gate[layer], tables.a_up[layer]), ranks[:, 4:6], step.shrink_tasks, row_starts, shrunk
            )
            expand(
                shrunk[:, 0], tables.b_gate[layer], runs, ranks[:, 4], row_starts, gate_up[:, :up_start], num_threads
            )
            expand(shrunk[:, 1], tables.b_up[layer], runs, ranks[:, 5], row_starts, gate_up[:, up_start:], num_threads)
        if sizes.gelu:
            gated_gelu(gate_up, up_start, gated)
        else:
            gated_silu(gate_up, up_start, gated)
        _add_rows(hidden[:, :width], weights.down_bias[layer])
        matmul_layer(gated, weights.down, layer, hidden, True, num_threads)
        if adapted:
            shrink(gated, (tables.a_down[layer],), ranks[:, 6:7], step.shrink_tasks, row_starts, shrunk)
            expand(shrunk[:, 0], tables.b_down[layer], runs, ranks[:, 6], row_starts, hidden, num_threads)
    num_sampled = step.sample_rows.shape[0]
    if num_sampled > 0:
        _gather_normed(hidden, step.sample_rows, weights.final_norm, sizes.eps, work.sampled[:num_sampled])
        matmul_layer(work.sampled[:num_sampled], weights.head, 0, work.logits[:num_sampled], False, num_threads)
