"""The decoder on the CPU: one compiled call runs all layers of a step, without the GIL.

In: packed weights, adapter tables, KV memory, a step's arrays. Out: hidden states of the rows that
sample, turned into logits. Everything is a NumPy array; the kernels are `app.kernels`. Weights and
tables of all layers are stacked so that the loop over layers is compiled too, and every thread of a `Team`
runs it: a layer is eight phases, and four more where adapters are in the batch.

There is one base product per module and step, whatever adapters the batch holds; deltas are added to it
in place, per run of tokens with one adapter. Base tokens do no adapter work. What an adapter does beyond low-rank
deltas (`app.kernels.extras`) is done to its own rows in the same phases, in batches that have such rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.extras.cpu import (
    ATTENTION_NORM,
    MLP_NORM,
    own_embedding,
    own_gather_normed,
    own_head,
    own_head_inputs,
    own_rms_norm,
    own_rotate_and_store,
)
from app.kernels.linear.cpu import Own, gate_and_up, project
from app.kernels.machine.compiled import compiled
from app.kernels.matmul.quantised import Stack, embed, layer_panels
from app.kernels.norms.cpu import gather_normed, rms_norm
from app.kernels.paged_attention.cpu import paged_attention
from app.kernels.rotary.cpu import rotate_and_store
from app.kernels.sgmv.cpu import RowPlaces, shrink
from app.kernels.sgmv.fetching import NextShrink

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
    """Rank rows of the seven modules: a as panels [L, R / 8, d_in, 8], b as [L, R, W], see `app.kernels.sgmv.cpu`.

    ranks: [L, S, 7] int32 in the order of `app.engine.adapters.lora.TARGETS`.
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
    places: RowPlaces
    ranks: NDArray[np.int32]


class Step(NamedTuple):
    """A step's arrays, as in `app.engine.batch.ForwardBatch`, with the kernels' task lists.

    widest_rank: the largest rank of its adapters. extra_runs: [E, 3], the runs whose adapters have extras;
    extra_samples: [E', 3], the same over sampled rows; extra_slots: [T], their adapter slots, else 0.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    attention_tasks: NDArray[np.int64]
    runs: NDArray[np.int64]
    shrink_tasks: NDArray[np.int64]
    widest_rank: int
    sample_rows: NDArray[np.int32]
    extra_runs: NDArray[np.int64]
    extra_samples: NDArray[np.int64]
    extra_slots: NDArray[np.int64]


class Workspace(NamedTuple):
    """Scratch for the largest step: T rows each, P rows of sampled states and logits.

    hidden, qkv and gate_up are as wide as the panels they are written in (padding included); normed,
    attended, gated and sampled are exactly as wide as the products that read them. shrunk: [T, 3, W].
    kept is as wide as hidden; head_inputs: [P, W].
    """

    hidden: Floats
    normed: Floats
    qkv: Floats
    attended: Floats
    gate_up: Floats
    gated: Floats
    shrunk: Floats
    kept: Floats
    sampled: Floats
    head_inputs: Floats
    logits: Floats


#: Phases of a layer, and of a step outside its layers.
LAYER_PHASES, STEP_PHASES = 12, 5


@compiled
def forward(team, phase, weights, sizes, tables, extras, k_memory, v_memory, step, work):
    """Run every layer over the step's T tokens; leave the P sampled rows' logits in work.logits.

    team, phase: see `app.kernels.machine.team`. k_memory: [L, blocks, kv_heads, D, block_size]; v_memory: [L, blocks,
    kv_heads, block_size, D]; the step's keys and values are written there.
    """
    num_tokens = step.token_ids.shape[0]
    hidden, normed = work.hidden[:num_tokens], work.normed[:num_tokens]
    qkv, attended = work.qkv[:num_tokens], work.attended[:num_tokens]
    gate_up, gated = work.gate_up[:num_tokens], work.gated[:num_tokens]
    shrunk = work.shrunk[:num_tokens]
    runs, places, tasks = step.runs, tables.places, step.shrink_tasks
    adapted = runs.shape[0] > 0
    width = weights.final_norm.shape[0]
    none = np.empty(0, np.float32)
    extra_runs, slots, kept = step.extra_runs, step.extra_slots, work.kept[:num_tokens]
    num_layers, has_extras = weights.layer_rope.shape[0], extra_runs.shape[0] > 0
    q, o, gate, down = np.int64(0), np.int64(3), np.int64(4), np.int64(6)

    phase = embed(team, phase, step.token_ids, weights.embedding, weights.head, hidden[:, :width])
    if has_extras:
        phase = own_embedding(team, phase, step.token_ids, extras, slots, hidden[:, :width])
    for layer in range(num_layers):
        ranks, later = tables.ranks[layer], min(layer + 1, num_layers - 1)
        a_o, a_gate, a_up, a_down = tables.a_o[layer], tables.a_gate[layer], tables.a_up[layer], tables.a_down[layer]
        # o is the smallest product, gate and up the largest shrink: memory is asked for gate before.
        next_o = NextShrink((a_o, a_gate, a_gate), ranks[:, 3:5])
        next_up = NextShrink((a_up, a_up, a_up), ranks[:, 5:6])
        next_down = NextShrink((a_down, a_down, a_down), ranks[:, 6:7])
        next_q = NextShrink((tables.a_q[later], tables.a_k[later], tables.a_v[later]), tables.ranks[later][:, 0:3])
        if has_extras:
            norms = extras.norms[layer, :, ATTENTION_NORM]
            phase = own_rms_norm(team, phase, hidden, weights.attention_norm[layer], sizes.eps, norms, slots, normed)
        else:
            phase = rms_norm(team, phase, hidden, weights.attention_norm[layer], sizes.eps, normed)
        if adapted:
            a = (tables.a_q[layer], tables.a_k[layer], tables.a_v[layer])
            phase = shrink(team, phase, normed, a, ranks[:, 0:3], tasks, step.widest_rank, places, shrunk)
        phase = project(
            team, phase, normed, layer_panels(weights.qkv, layer), weights.qkv_bias[layer], False, shrunk,
            (tables.b_q[layer], tables.b_k[layer], tables.b_v[layer]), ranks[:, 0:3], runs, places,
            next_o, Own(extras, layer, q, extra_runs, kept), qkv,
        )  # fmt: skip
        rope = weights.layer_rope[layer]
        if has_extras:
            phase = own_rotate_and_store(
                team, phase, extras.norms[layer], slots, qkv, step.positions, step.kv_slots, weights.cos[rope],
                weights.sin[rope], weights.q_norm[layer], weights.k_norm[layer], sizes.eps, k_memory[layer],
                v_memory[layer], sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.q_size, sizes.kv_size,
            )  # fmt: skip
        else:
            phase = rotate_and_store(
                team, phase, qkv, step.positions, step.kv_slots, weights.cos[rope], weights.sin[rope],
                weights.q_norm[layer], weights.k_norm[layer], sizes.eps, k_memory[layer], v_memory[layer],
                sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.q_size, sizes.kv_size,
            )  # fmt: skip
        phase = paged_attention(
            team, phase, qkv, sizes.head_dim, weights.scales[layer], weights.layer_window[layer], step.attention_tasks,
            step.query_starts, step.seq_lens, step.block_tables, k_memory[layer], v_memory[layer], attended,
        )  # fmt: skip
        if adapted:
            phase = shrink(team, phase, attended, (a_o,), ranks[:, 3:4], tasks, step.widest_rank, places, shrunk)
        # The residual is where the sums of o and down start: no separate addition.
        phase = project(
            team, phase, attended, layer_panels(weights.out, layer), weights.out_bias[layer], True, shrunk,
            (tables.b_o[layer],), ranks[:, 3:4], runs, places, next_up, Own(extras, layer, o, extra_runs, kept),
            hidden,
        )  # fmt: skip
        if has_extras:
            norms = extras.norms[layer, :, MLP_NORM]
            phase = own_rms_norm(team, phase, hidden, weights.mlp_norm[layer], sizes.eps, norms, slots, normed)
        else:
            phase = rms_norm(team, phase, hidden, weights.mlp_norm[layer], sizes.eps, normed)
        if adapted:
            phase = shrink(team, phase, normed, (a_gate, a_up), ranks[:, 4:6], tasks, step.widest_rank, places, shrunk)
        phase = gate_and_up(
            team, phase, normed, layer_panels(weights.gate_up, layer), weights.gate_up_bias[layer], shrunk,
            (tables.b_gate[layer], tables.b_up[layer]), ranks[:, 4:6], runs, places,
            next_down, Own(extras, layer, gate, extra_runs, kept), sizes.gelu, gate_up, gated,
        )  # fmt: skip
        if adapted:
            phase = shrink(team, phase, gated, (a_down,), ranks[:, 6:7], tasks, step.widest_rank, places, shrunk)
        phase = project(
            team, phase, gated, layer_panels(weights.down, layer), weights.down_bias[layer], True, shrunk,
            (tables.b_down[layer],), ranks[:, 6:7], runs, places, next_q, Own(extras, layer, down, extra_runs, kept),
            hidden,
        )  # fmt: skip
    num_sampled = step.sample_rows.shape[0]
    if num_sampled > 0:
        sampled, logits = work.sampled[:num_sampled], work.logits[:num_sampled]
        head = layer_panels(weights.head, 0)
        if has_extras:
            inputs, samples = work.head_inputs[:num_sampled], step.extra_samples
            phase = own_gather_normed(
                team, phase, hidden, step.sample_rows, weights.final_norm, sizes.eps, extras.final_norm, slots, sampled
            )
            phase = own_head_inputs(team, phase, sampled, extras, samples, inputs)
            phase = own_head(team, phase, sampled, head, extras, samples, inputs, logits)
        else:
            phase = gather_normed(team, phase, hidden, step.sample_rows, weights.final_norm, sizes.eps, sampled)
            phase = project(
                team, phase, sampled, head, none, False, shrunk, (tables.b_down[0],), tables.ranks[0][:, 6:7], runs[:0],
                places, next_q, Own(extras, np.int64(0), q, extra_runs, kept), logits,
            )  # fmt: skip
    return phase
