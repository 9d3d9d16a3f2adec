"""A mixture of experts on the CPU: one layer of `decoder.forward`, and its scratch memory.

Tokens are sorted by expert, so a layer reads the weights of the experts that its tokens use, once each, and no others.
It is batch-invariant (`app.kernels.moe_lora`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.lora_views import LoraView, lora_at, padded_width, rows_of_layer, single_product
from app.engine.models.linear_modules import stacked_modules
from app.engine.models.spec import ModelSpec
from app.kernels.extra_weights.cpu import MLP_NORM, rms_norm_with_extras
from app.kernels.linear.cpu import LinearExtras, gate_and_up
from app.kernels.machine.jit import jit
from app.kernels.matmul.int8 import Stack, layer_panels
from app.kernels.moe_lora.cpu import ExpertRows, experts_down, experts_gate_and_up, shrink_pairs
from app.kernels.moe_lora.routing import Pairs, combine, empty_pairs, gather_pairs, route, sort_pairs

Floats = NDArray[np.float32]

#: Phases of a mixture-of-experts feed-forward.
MOE_PHASES = 23


class MoeWeights(NamedTuple):
    """Packed weights of the M layers that have experts, and the numbers of these layers.

    stacked_layer: [L], a layer's index among those M, or -1; stacked_dense_layer: [L], its index among the others, or
    -1. router: [M, ...]; gate_up, down: [M * E, ...], a layer's experts one after the other. shared_gate,
    shared_gate_up, shared_down: [M, ...], or [0, ...] where there is no shared expert, or no gate of it. router_bias:
    [M, W], or [M, 0]; gate_up_bias, down_bias: [M * E, ...], or [0, 0]. no_bias: [0].
    """

    stacked_layer: NDArray[np.int64]
    stacked_dense_layer: NDArray[np.int64]
    router: Stack
    gate_up: Stack
    down: Stack
    shared_gate: Stack
    shared_gate_up: Stack
    shared_down: Stack
    router_bias: Floats
    gate_up_bias: Floats
    down_bias: Floats
    no_bias: Floats


class MoeTables(NamedTuple):
    """Rank rows by linear module, layers counted as in `MoeWeights`. gate_up, down: `ExpertRows`, [M, S, E, N]."""

    router: LoraView
    shared_gate: LoraView
    shared_gate_up: LoraView
    shared_down: LoraView
    gate_up: ExpertRows
    down: ExpertRows


class MoeWorkspace(NamedTuple):
    """Scratch for the largest step of T tokens, which make P = T * K pairs; widths as in `decoder.Workspace`.

    shrunk: [P, 2, W]. gates: [T, W] or [0, W], column 0 is the shared expert's gate; shared*: [T, ...] or [0, ...].
    """

    pairs: Pairs
    logits: Floats
    inputs: Floats
    gate_up: Floats
    gated: Floats
    outputs: Floats
    shrunk: Floats
    gates: Floats
    shared_gate_up: Floats
    shared_gated: Floats
    shared: Floats


@jit
def moe_feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work):
    """hidden += Σ share_e * expert_e(x) + gate * shared(x) with x = norm(hidden), every product with its LoRA."""
    num_tokens, width = step.token_ids.shape[0], weights.final_norm.shape[0]
    moe, scratch = weights.moe, work.moe
    stacked_layer, pairs = moe.stacked_layer[layer], scratch.pairs
    num_pairs = num_tokens * pairs.experts.shape[1]
    hidden, normed = work.hidden[:num_tokens], work.normed[:num_tokens]
    norms, slots = extras.norms[layer, :, MLP_NORM], step.adapter_slots
    phase = rms_norm_with_extras(
        team, phase, hidden, weights.mlp_norm[layer], sizes.eps, norms, step.extra_slots, normed
    )
    phase = single_product(
        team, phase, layer, stacked_layer, normed, moe.router, moe.router_bias[stacked_layer], tables.moe.router,
        extras, step, work, scratch.logits[:num_tokens],
    )  # fmt: skip
    phase = route(
        team, phase, scratch.logits[:num_tokens], sizes.normalised, sizes.share_scale, sizes.num_groups,
        sizes.top_groups, pairs,
    )  # fmt: skip
    phase = sort_pairs(team, phase, num_tokens, pairs)
    phase = gather_pairs(team, phase, normed, num_tokens, pairs, scratch.inputs)

    rows, first = rows_of_layer(tables.moe.gate_up, stacked_layer), stacked_layer * pairs.busy.shape[0]
    if slots.shape[0] > 0:
        phase = shrink_pairs(team, phase, scratch.inputs, num_pairs, pairs, slots, rows, scratch.shrunk)
    phase = experts_gate_and_up(
        team, phase, scratch.inputs, num_pairs, pairs, slots, moe.gate_up, first, moe.gate_up_bias, rows,
        scratch.shrunk, sizes.gelu, sizes.limit, sizes.alpha, scratch.gate_up, scratch.gated,
    )  # fmt: skip
    rows = rows_of_layer(tables.moe.down, stacked_layer)
    if slots.shape[0] > 0:
        phase = shrink_pairs(team, phase, scratch.gated, num_pairs, pairs, slots, rows, scratch.shrunk)
    phase = experts_down(
        team, phase, scratch.gated, num_pairs, pairs, slots, moe.down, first, moe.down_bias, rows,
        scratch.shrunk, scratch.outputs,
    )  # fmt: skip
    if scratch.shared.shape[0] > 0:
        phase = _shared_expert(team, phase, layer, stacked_layer, weights, sizes, tables, extras, step, work)
    shared = scratch.shared[: min(num_tokens, scratch.shared.shape[0])]
    gates = scratch.gates[: min(num_tokens, scratch.gates.shape[0]), 0]
    return combine(team, phase, scratch.outputs, pairs, shared, gates, width, hidden)


@jit
def _shared_expert(team, phase, layer, stacked_layer, weights, sizes, tables, extras, step, work):
    """Compute the shared expert of every token, and its gate, into the shared scratch."""
    num_tokens, moe, scratch = step.token_ids.shape[0], weights.moe, work.moe
    normed, gated = work.normed[:num_tokens], scratch.shared_gated[:num_tokens]
    saved, rows = work.saved[:num_tokens], tables.moe.shared_gate_up
    if scratch.gates.shape[0] > 0:
        phase = single_product(
            team, phase, layer, stacked_layer, normed, moe.shared_gate, moe.no_bias, tables.moe.shared_gate, extras,
            step, work, scratch.gates[:num_tokens],
        )  # fmt: skip
    phase = gate_and_up(
        team, phase, normed, layer_panels(moe.shared_gate_up, stacked_layer), moe.no_bias,
        lora_at(rows, stacked_layer, stacked_layer, step, work),
        LinearExtras(extras, layer, rows.first, step.extra_runs, saved), sizes.gelu,
        scratch.shared_gate_up[:num_tokens], gated,
    )  # fmt: skip
    return single_product(
        team, phase, layer, stacked_layer, gated, moe.shared_down, moe.no_bias, tables.moe.shared_down, extras,
        step, work, scratch.shared[:num_tokens],
    )  # fmt: skip


def moe_workspace(spec: ModelSpec, num_tokens: int) -> MoeWorkspace | None:
    """The scratch memory that all layers with experts share; None without experts."""
    modules = {module.name: module for module, _ in stacked_modules(spec)}
    mixture = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    if mixture is None:
        return None
    router = mixture.router
    num_pairs, expert_size = num_tokens * router.top_k, modules["experts_down"].d_in
    shared_size = modules["shared_down"].d_in if "shared_down" in modules else 0

    def rows(count: int, width: int) -> NDArray[np.float32]:
        return np.zeros((count, width), np.float32)

    return MoeWorkspace(
        pairs=empty_pairs(num_tokens, router.top_k, router.num_experts),
        logits=rows(num_tokens, padded_width(router.num_experts)),
        inputs=rows(num_pairs, spec.hidden_size),
        gate_up=rows(num_pairs, 2 * padded_width(expert_size)),
        gated=rows(num_pairs, expert_size),
        outputs=rows(num_pairs, padded_width(spec.hidden_size)),
        shrunk=np.zeros((num_pairs, 2, 16), np.float32),
        gates=rows(num_tokens if "shared_gate" in modules else 0, padded_width(1)),
        shared_gate_up=rows(num_tokens if shared_size else 0, 2 * padded_width(shared_size)),
        shared_gated=rows(num_tokens if shared_size else 0, shared_size),
        shared=rows(num_tokens if shared_size else 0, padded_width(spec.hidden_size)),
    )
