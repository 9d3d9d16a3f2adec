"""Multi-head latent attention (MLA) on the CPU: one layer of `decoder.forward`, and its scratch memory.

The latents of the step's tokens are written to the KV memory. `kv_b_proj` is never applied to a latent (absorption):
its rows of keys are applied to queries and its rows of values to sums of latents, head by head, with LoRA on either
side. A head is treated as an expert that every token uses (`app.kernels.moe_lora`), so it is batch-invariant.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.lora_views import LoraView, lora_at, padded_width, rows_of_layer, single_product
from app.engine.models.spec import ModelSpec
from app.kernels.extra_weights.cpu import ATTENTION_NORM, K_NORM, Q_NORM, rms_norm_with_extras
from app.kernels.linear.cpu import LinearExtras, project
from app.kernels.machine.jit import jit
from app.kernels.matmul.int8 import Stack, layer_panels
from app.kernels.mla_attention.cpu import bring_heads_together, latent_attention, rotate_and_store
from app.kernels.moe_lora.cpu import ExpertRows, experts_down, shrink_pairs
from app.kernels.moe_lora.routing import Pairs, empty_pairs, sort_pairs

Floats = NDArray[np.float32]

#: The most phases of a layer's latent attention.
MLA_PHASES = 27


class MlaWeights(NamedTuple):
    """Packed weights of L layers. query: [L, ...], or query_a and query_b; the others have none (`[0, ...]`).

    latent_keys, latent_values: [L * N, ...], a layer's heads one after the other. query_latent_norm, latent_norm:
    [L, R]. no_biases: [0, 0].
    """

    query: Stack
    query_a: Stack
    query_a_bias: Floats
    query_b: Stack
    latent_a: Stack
    latent_a_bias: Floats
    latent_keys: Stack
    latent_values: Stack
    query_latent_norm: Floats
    latent_norm: Floats
    no_bias: Floats
    no_biases: Floats
    key_size: int
    rope_size: int
    norm_eps: np.float32


class MlaTables(NamedTuple):
    """Rank rows by linear module. keys, values: `ExpertRows` with heads as experts, [L, S, N, 1]."""

    query: LoraView
    query_a: LoraView
    query_b: LoraView
    latent_a: LoraView
    keys: ExpertRows
    values: ExpertRows


class MlaWorkspace(NamedTuple):
    """Scratch for the largest step of T tokens, which make T * N pairs with heads; widths as in `decoder.Workspace`.

    pairs: every token with every head. query_latents: [T, R], [0, 0] without such. own: [T * N, P]; absorbed: [T * N,
    R]; values: [T * N, V]. shrunk: [T * N, 1, W].
    """

    pairs: Pairs
    queries: Floats
    query_latents: Floats
    normed_query_latents: Floats
    latents: Floats
    own: Floats
    absorbed: Floats
    values: Floats
    shrunk: Floats


@jit
def mla_attention(team, phase, layer, weights, sizes, tables, extras, memory, step, work):
    """hidden += o(attention(norm(hidden))), every product with its LoRA. memory: [blocks, 1, block_size, W]."""
    num_tokens, mla, scratch = step.token_ids.shape[0], weights.mla, work.mla
    hidden, normed = work.hidden[:num_tokens], work.normed[:num_tokens]
    norms, slots, rope = extras.norms[layer], step.extra_slots, weights.layer_rope[layer]
    latents, kv_rank = scratch.latents[:num_tokens], scratch.absorbed.shape[1]

    phase = rms_norm_with_extras(
        team, phase, hidden, weights.attention_norm[layer], sizes.eps, norms[:, ATTENTION_NORM], slots, normed
    )
    phase = _queries(team, phase, layer, weights, tables, extras, step, work)
    phase = single_product(
        team, phase, layer, layer, normed, mla.latent_a, mla.latent_a_bias[layer], tables.mla.latent_a,
        extras, step, work, latents,
    )  # fmt: skip
    phase = rms_norm_with_extras(
        team, phase, latents, mla.latent_norm[layer], mla.norm_eps, norms[:, K_NORM], slots, latents
    )
    queries, own = scratch.queries[:num_tokens], scratch.own
    phase = rotate_and_store(
        team, phase, queries, latents, step.positions, step.kv_slots, weights.cos[rope], weights.sin[rope],
        sizes.num_heads, mla.key_size, kv_rank, memory, own,
    )  # fmt: skip
    if layer == 0:
        phase = sort_pairs(team, phase, num_tokens, scratch.pairs)
    rows = rows_of_layer(tables.mla.keys, layer)
    phase = _by_head(team, phase, layer, own, mla.latent_keys, mla.no_biases, rows, step, scratch, scratch.absorbed)
    phase = latent_attention(
        team, phase, queries, scratch.absorbed, sizes.num_heads, mla.key_size, mla.rope_size,
        weights.scales[layer], step.attention_tasks, step.query_starts, step.seq_lens, step.block_tables, memory,
    )  # fmt: skip
    rows = rows_of_layer(tables.mla.values, layer)
    phase = _by_head(
        team, phase, layer, scratch.absorbed, mla.latent_values, mla.no_biases, rows, step, scratch,
        scratch.values,
    )  # fmt: skip
    attended = work.attended[:num_tokens]
    phase = bring_heads_together(team, phase, scratch.values, sizes.num_heads, attended)
    return _output(team, phase, layer, attended, weights, tables, extras, step, work)


@jit
def _queries(team, phase, layer, weights, tables, extras, step, work):
    """The queries of all heads, directly or through a query latent."""
    num_tokens, mla, scratch = step.token_ids.shape[0], weights.mla, work.mla
    normed, queries = work.normed[:num_tokens], scratch.queries[:num_tokens]
    if scratch.query_latents.shape[0] == 0:
        return single_product(
            team, phase, layer, layer, normed, mla.query, mla.no_bias, tables.mla.query, extras, step, work,
            queries,
        )  # fmt: skip
    raw, narrow = scratch.query_latents[:num_tokens], scratch.normed_query_latents[:num_tokens]
    phase = single_product(
        team, phase, layer, layer, normed, mla.query_a, mla.query_a_bias[layer], tables.mla.query_a, extras,
        step, work, raw,
    )  # fmt: skip
    norms = extras.norms[layer, :, Q_NORM]
    phase = rms_norm_with_extras(
        team, phase, raw, mla.query_latent_norm[layer], mla.norm_eps, norms, step.extra_slots, narrow
    )
    return single_product(
        team, phase, layer, layer, narrow, mla.query_b, mla.no_bias, tables.mla.query_b, extras, step, work,
        queries,
    )  # fmt: skip


@jit
def _by_head(team, phase, layer, x, stack, no_biases, rows, step, scratch, out):
    """out[h * T + t] = x[h * T + t] @ head h's weight, with its adapter's LoRA."""
    num_heads = scratch.pairs.busy.shape[0]
    num_pairs, slots = step.token_ids.shape[0] * num_heads, step.adapter_slots
    if slots.shape[0] > 0:
        phase = shrink_pairs(team, phase, x, num_pairs, scratch.pairs, slots, rows, scratch.shrunk)
    return experts_down(
        team, phase, x, num_pairs, scratch.pairs, slots, stack, layer * num_heads, no_biases, rows, scratch.shrunk, out
    )


@jit
def _output(team, phase, layer, attended, weights, tables, extras, step, work):
    """hidden += o(attended)."""
    num_tokens, rows = attended.shape[0], tables.o
    return project(
        team, phase, attended, layer_panels(weights.o, layer), weights.o_bias[layer], True,
        lora_at(rows, layer, layer, step, work),
        LinearExtras(extras, layer, rows.first, step.extra_runs, work.saved[:num_tokens]), work.hidden[:num_tokens],
    )  # fmt: skip


def mla_workspace(spec: ModelSpec, num_tokens: int) -> MlaWorkspace | None:
    """The scratch memory that all layers share; None without MLA."""
    attention = spec.layers[0].attention
    latent, heads = attention.latent, attention.num_heads
    if latent is None:
        return None

    def rows(count: int, width: int) -> NDArray[np.float32]:
        return np.zeros((count, width), np.float32)

    pairs = empty_pairs(num_tokens, heads, heads)
    pairs.experts[:] = np.arange(heads)
    rank = latent.query_rank
    with_rank = 0 if rank is None else num_tokens
    return MlaWorkspace(
        pairs=pairs,
        queries=rows(num_tokens, padded_width(heads * attention.head_dim)),
        query_latents=rows(with_rank, padded_width(rank or 0)),
        normed_query_latents=rows(with_rank, rank or 0),
        latents=rows(num_tokens, padded_width(latent.width)),
        own=rows(num_tokens * heads, latent.key_size),
        absorbed=rows(num_tokens * heads, latent.kv_rank),
        values=rows(num_tokens * heads, latent.value_size),
        shrunk=np.zeros((num_tokens * heads, 1, 16), np.float32),
    )
