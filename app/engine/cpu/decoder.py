"""The decoder on the CPU: one compiled call runs all layers of a step, without the GIL.

Input: packed weights, adapter tables, KV memory and a step's arrays; output: logits of the rows that sample. Everything
is a NumPy array; the kernels are in `app.kernels`. Weights and tables are stacked over layers so that the loop over
layers is compiled too, and every thread of a `ThreadTeam` runs it: a layer is eight phases, and four more with adapters
in the batch.

There is one base product per module and step, whatever adapters the batch holds; LoRA products are added to it in
place, per run of tokens with one adapter. Base tokens do no adapter work. Extra weights (`app.kernels.extra_weights`)
are applied to an adapter's own rows in the same phases, in batches that have such rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from app.engine.cpu.lora_views import LoraView, lora_at
from app.engine.cpu.mla import MLA_PHASES, MlaTables, MlaWeights, MlaWorkspace, mla_attention
from app.engine.cpu.moe import MOE_PHASES, MoeTables, MoeWeights, MoeWorkspace, moe_feed_forward
from app.kernels.extra_weights.cpu import (
    ATTENTION_NORM,
    K_NORM,
    MLP_NORM,
    Q_NORM,
    change_embeddings,
    extra_head_inputs,
    gather_normed_with_extras,
    head_with_extras,
    rms_norm_with_extras,
    rotate_and_store_with_extras,
)
from app.kernels.linear.cpu import LinearExtras, gate_and_up, project
from app.kernels.machine.jit import jit
from app.kernels.matmul.int8 import Stack, embed, layer_panels
from app.kernels.norms.cpu import normalise_and_add
from app.kernels.paged_attention.cpu import paged_attention
from app.kernels.softcap.cpu import cap_rows, scale_rows

Floats = NDArray[np.float32]


class Weights(NamedTuple):
    """Packed weights, layers stacked: L layers, P panels of 16 columns; a `Stack` is float32 or 8 bits.

    qkv and gate_up hold their modules side by side, each padded to whole panels; gate_up and down have the layers
    without experts only (`moe` has the others). Biases, q_norm and k_norm are `[L, 0]` where the model has none.
    `embedding` is `[V, H]`, or `[0, H]` if the rows are read from `head` `[1, P, H, 16]` (tied). cos, sin: [ropes,
    positions, rotary / 2]; layer_rope, layer_window: [L]. post_attention_norm and post_mlp_norm are `[L, 0]` in models
    without them, and so are sinks `[L, heads]`.
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
    o: Stack
    o_bias: Floats
    gate_up: Stack
    gate_up_bias: Floats
    down: Stack
    down_bias: Floats
    cos: Floats
    sin: Floats
    layer_rope: NDArray[np.int64]
    layer_window: NDArray[np.int64]
    scales: Floats
    post_attention_norm: Floats
    post_mlp_norm: Floats
    sinks: Floats
    moe: MoeWeights | None
    mla: MlaWeights | None


class Sizes(NamedTuple):
    """Integers of the model. q_size and kv_size are padded to whole panels.

    whole_norm: q_norm and k_norm span all heads. normalised, share_scale, num_groups, top_groups: see
    `app.kernels.moe_lora.routing.route`. limit, alpha: see `activate_clamped`; 0 for another activation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_size: int
    kv_size: int
    gelu: bool
    eps: np.float32
    post_norms: bool
    softcap: np.float32
    logit_softcap: np.float32
    embedding_scale: np.float32
    whole_norm: bool
    normalised: bool
    share_scale: np.float32
    num_groups: int
    top_groups: int
    limit: np.float32
    alpha: np.float32


class AdapterTables(NamedTuple):
    """Rank rows of all linear modules."""

    qkv: LoraView
    o: LoraView
    gate_up: LoraView
    down: LoraView
    moe: MoeTables | None
    mla: MlaTables | None


class Step(NamedTuple):
    """A step's arrays, as in `app.engine.batch.ForwardBatch`, with the kernels' task lists.

    pooled_rows: [N], tokens whose normalised states are summed. widest_rank: the largest rank of its adapters.
    extra_runs: [E, 3], the runs whose adapters have extra weights; extra_samples: [E', 3], the same over sampled rows;
    extra_slots: [T], their adapter slots, else 0. adapter_slots: [T], the slots of adapters that change experts, else
    0; [0] if none does.
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
    pooled_rows: NDArray[np.int32]
    adapter_slots: NDArray[np.int64]


class Workspace(NamedTuple):
    """Scratch for the largest step: T rows each, P rows of sampled states and logits.

    hidden, qkv and gate_up are as wide as the panels they are written in (padding included); normed, attended, gated
    and sampled are exactly as wide as the products that read them. shrunk: [T, 3, W]. saved is as wide as
    hidden, and so is projected with post_norms; head_inputs: [P, W]; states: [T, H], of the pooled rows.
    """

    hidden: Floats
    normed: Floats
    qkv: Floats
    attended: Floats
    gate_up: Floats
    gated: Floats
    shrunk: Floats
    saved: Floats
    projected: Floats
    sampled: Floats
    head_inputs: Floats
    logits: Floats
    states: Floats
    moe: MoeWorkspace | None
    mla: MlaWorkspace | None


#: Phases of a step outside its layers, and the most of a layer.
STEP_PHASES, LAYER_PHASES = 9, 15 + MOE_PHASES + MLA_PHASES


@jit
def forward(team, phase, weights, sizes, tables, extras, k_memory, v_memory, step, work):
    """Run every layer over the step's T tokens; leave the P sampled rows' logits in work.logits.

    team, phase: see `app.kernels.machine.thread_team`. k_memory: [L, blocks, kv_heads, D, block_size]; v_memory: [L,
    blocks, kv_heads, block_size, D]; the step's keys and values are written there. MLA's latents are in v_memory, with
    one head. Both are float32, or bfloat16 in uint16. If no adapter of the step has extra weights, `step.extra_runs`
    and `step.extra_slots` are empty, and the operations that take them do the base model's arithmetic only.
    """
    num_tokens, width, num_layers = step.token_ids.shape[0], weights.final_norm.shape[0], weights.layer_rope.shape[0]
    hidden = work.hidden[:num_tokens]
    phase = embed(team, phase, step.token_ids, weights.embedding, weights.head, hidden[:, :width])
    if step.extra_runs.shape[0] > 0:
        phase = change_embeddings(team, phase, step.token_ids, extras, step.extra_slots, hidden[:, :width])
    if sizes.embedding_scale != np.float32(1.0):
        phase = scale_rows(team, phase, sizes.embedding_scale, hidden[:, :width])
    for layer in range(num_layers):
        phase = _any_attention(
            team, phase, layer, weights, sizes, tables, extras, k_memory[layer], v_memory[layer], step, work
        )
        phase = _any_feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work)
    if step.sample_rows.shape[0] > 0:
        phase = _logits(team, phase, weights, sizes, extras, step, work)
    if step.pooled_rows.shape[0] > 0:
        phase = gather_normed_with_extras(
            team, phase, hidden, step.pooled_rows, weights.final_norm, sizes.eps, extras.final_norm, step.extra_slots,
            work.states[: step.pooled_rows.shape[0]],
        )  # fmt: skip
    return phase


def _any_attention(team, phase, layer, weights, sizes, tables, extras, k_memory, v_memory, step, work):
    """hidden += the layer's attention, of the model's kind."""
    raise NotImplementedError("called from compiled code only")


@overload(_any_attention)
def _attention_of(team, phase, layer, weights, sizes, tables, extras, k_memory, v_memory, step, work):  # noqa: ARG001
    if isinstance(weights.types[weights.fields.index("mla")], types.NoneType):
        return lambda team, phase, layer, weights, sizes, tables, extras, k_memory, v_memory, step, work: _attention(  # noqa: PLW0108
            team, phase, layer, weights, sizes, tables, extras, k_memory, v_memory, step, work
        )
    return lambda team, phase, layer, weights, sizes, tables, extras, k_memory, v_memory, step, work: (  # noqa: ARG005
        mla_attention(team, phase, layer, weights, sizes, tables, extras, v_memory, step, work)
    )


@jit
def _attention(team, phase, layer, weights, sizes, tables, extras, k_memory, v_memory, step, work):
    """hidden += o(attention(qkv(norm(hidden)))), every product with its LoRA."""
    num_tokens = step.token_ids.shape[0]
    hidden, normed, qkv = work.hidden[:num_tokens], work.normed[:num_tokens], work.qkv[:num_tokens]
    attended, saved, slots = work.attended[:num_tokens], work.saved[:num_tokens], step.extra_slots
    norms, rope, rows, rows_o = extras.norms[layer], weights.layer_rope[layer], tables.qkv, tables.o

    phase = rms_norm_with_extras(
        team, phase, hidden, weights.attention_norm[layer], sizes.eps, norms[:, ATTENTION_NORM], slots, normed
    )
    phase = project(
        team, phase, normed, layer_panels(weights.qkv, layer), weights.qkv_bias[layer], False,
        lora_at(rows, layer, layer, step, work), LinearExtras(extras, layer, rows.first, step.extra_runs, saved), qkv,
    )  # fmt: skip
    q_norm, k_norm = weights.q_norm[layer], weights.k_norm[layer]
    if sizes.whole_norm:
        q, k = qkv[:, : sizes.q_size], qkv[:, sizes.q_size : sizes.q_size + sizes.kv_size]
        phase = rms_norm_with_extras(team, phase, q, q_norm, sizes.eps, norms[:, Q_NORM], slots, q)
        phase = rms_norm_with_extras(team, phase, k, k_norm, sizes.eps, norms[:, K_NORM], slots, k)
        q_norm, k_norm = q_norm[:0], k_norm[:0]
    phase = rotate_and_store_with_extras(
        team, phase, norms, slots, qkv, step.positions, step.kv_slots, weights.cos[rope], weights.sin[rope],
        q_norm, k_norm, sizes.eps, k_memory, v_memory, sizes.num_heads,
        sizes.num_kv_heads, sizes.head_dim, sizes.q_size, sizes.kv_size,
    )  # fmt: skip
    phase = paged_attention(
        team, phase, qkv, sizes.head_dim, weights.scales[layer], weights.layer_window[layer], sizes.softcap,
        weights.sinks[layer], step.attention_tasks, step.query_starts, step.seq_lens, step.block_tables, k_memory,
        v_memory, attended,
    )  # fmt: skip
    # Without a norm after o, its sums start from the residual: no separate addition.
    own = work.projected[:num_tokens] if sizes.post_norms else hidden
    phase = project(
        team, phase, attended, layer_panels(weights.o, layer), weights.o_bias[layer], not sizes.post_norms,
        lora_at(rows_o, layer, layer, step, work), LinearExtras(extras, layer, rows_o.first, step.extra_runs, saved),
        own,
    )  # fmt: skip
    if sizes.post_norms:
        phase = normalise_and_add(team, phase, own, weights.post_attention_norm[layer], sizes.eps, hidden)
    return phase


def _any_feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work):
    """hidden += the layer's feed-forward, of the model's or the layer's kind."""
    raise NotImplementedError("called from compiled code only")


@overload(_any_feed_forward)
def _feed_forward_of(team, phase, layer, weights, sizes, tables, extras, step, work):  # noqa: ARG001
    if isinstance(weights.types[weights.fields.index("moe")], types.NoneType):
        return lambda team, phase, layer, weights, sizes, tables, extras, step, work: _feed_forward(
            team, phase, layer, layer, weights, sizes, tables, extras, step, work
        )
    return lambda team, phase, layer, weights, sizes, tables, extras, step, work: _mixed_feed_forward(  # noqa: PLW0108
        team, phase, layer, weights, sizes, tables, extras, step, work
    )


@jit
def _mixed_feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work):
    """The feed-forward of a model in which some layers have experts."""
    stacked_layer = weights.moe.stacked_dense_layer[layer]
    if stacked_layer >= 0:
        return _feed_forward(team, phase, layer, stacked_layer, weights, sizes, tables, extras, step, work)
    return moe_feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work)


@jit
def _feed_forward(team, phase, layer, stacked_layer, weights, sizes, tables, extras, step, work):
    """hidden += down(act(gate(x)) * up(x)) with x = norm(hidden), every product with its LoRA.

    stacked_layer: the layer's index among those without experts.
    """
    num_tokens = step.token_ids.shape[0]
    hidden, normed, gate_up = work.hidden[:num_tokens], work.normed[:num_tokens], work.gate_up[:num_tokens]
    gated, saved, norms = work.gated[:num_tokens], work.saved[:num_tokens], extras.norms[layer, :, MLP_NORM]
    rows, rows_down = tables.gate_up, tables.down

    phase = rms_norm_with_extras(
        team, phase, hidden, weights.mlp_norm[layer], sizes.eps, norms, step.extra_slots, normed
    )
    phase = gate_and_up(
        team, phase, normed, layer_panels(weights.gate_up, stacked_layer), weights.gate_up_bias[stacked_layer],
        lora_at(rows, stacked_layer, stacked_layer, step, work),
        LinearExtras(extras, layer, rows.first, step.extra_runs, saved), sizes.gelu, gate_up, gated,
    )  # fmt: skip
    later = min(stacked_layer + 1, rows_down.upcoming.ranks.shape[0] - 1)
    own = work.projected[:num_tokens] if sizes.post_norms else hidden
    phase = project(
        team, phase, gated, layer_panels(weights.down, stacked_layer), weights.down_bias[stacked_layer],
        not sizes.post_norms, lora_at(rows_down, stacked_layer, later, step, work),
        LinearExtras(extras, layer, rows_down.first, step.extra_runs, saved), own,
    )  # fmt: skip
    if sizes.post_norms:
        phase = normalise_and_add(team, phase, own, weights.post_mlp_norm[layer], sizes.eps, hidden)
    return phase


@jit
def _logits(team, phase, weights, sizes, extras, step, work):
    """work.logits of the sampled rows, normalised into work.sampled."""
    num_tokens, num_sampled = step.token_ids.shape[0], step.sample_rows.shape[0]
    sampled, inputs = work.sampled[:num_sampled], work.head_inputs[:num_sampled]
    phase = gather_normed_with_extras(
        team, phase, work.hidden[:num_tokens], step.sample_rows, weights.final_norm, sizes.eps, extras.final_norm,
        step.extra_slots, sampled,
    )  # fmt: skip
    if step.extra_samples.shape[0] > 0:
        phase = extra_head_inputs(team, phase, sampled, extras, step.extra_samples, inputs)
    head = layer_panels(weights.head, 0)
    logits = work.logits[:num_sampled]
    phase = head_with_extras(team, phase, sampled, head, extras, step.extra_samples, inputs, logits)
    if sizes.logit_softcap > np.float32(0.0):
        phase = cap_rows(team, phase, sizes.logit_softcap, logits)
    return phase
