"""A mixture of experts on the CPU, as one layer of `decoder.forward` computes it.

In: hidden states, the layer's router, experts and shared expert, and where adapters' rows of them lie. Out: hidden
states with the token's experts added. Tokens are sorted by expert, so a layer reads the weights of the experts that
its tokens use, once each, and no others. A token's bits do not depend on its company (`app.kernels.moe_lora`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.product_rows import ProductRows, upcoming_of
from app.kernels.extras.cpu import MLP_NORM, rms_norm_with_extras
from app.kernels.linear.cpu import ProductExtras, gate_and_up, project
from app.kernels.machine.compiled import compiled
from app.kernels.matmul.quantised import Stack, layer_panels
from app.kernels.moe_lora.cpu import ExpertRows, experts_down, experts_gate_and_up, shrink_pairs
from app.kernels.moe_lora.routing import Pairs, combine, gather_pairs, route, sort_pairs
from app.kernels.sgmv.cpu import shrink

Floats = NDArray[np.float32]

#: Phases of a layer's feed-forward that is a mixture of experts.
EXPERT_PHASES = 17


class ExpertWeights(NamedTuple):
    """Packed weights of the M layers that have experts, and which layers these are.

    place: [L], a layer's index among those M, or -1; dense_place: [L], its index among the others, or -1. router:
    [M, ...]; gate_up, down: [M * E, ...], a layer's experts one after the other. shared_gate, shared_gate_up,
    shared_down: [M, ...], or [0, ...] where no expert is shared, or its gate is missing. no_bias: [0].
    """

    place: NDArray[np.int64]
    dense_place: NDArray[np.int64]
    router: Stack
    gate_up: Stack
    down: Stack
    shared_gate: Stack
    shared_gate_up: Stack
    shared_down: Stack
    no_bias: Floats


class ExpertTables(NamedTuple):
    """Rank rows by product, their layers counted as in `ExpertWeights`. gate_up, down: `ExpertRows`, [M, S, E, N]."""

    router: ProductRows
    shared_gate: ProductRows
    shared_gate_up: ProductRows
    shared_down: ProductRows
    gate_up: ExpertRows
    down: ExpertRows


class ExpertWork(NamedTuple):
    """Scratch for the largest step of T tokens, which make P = T * K pairs; widths as of `decoder.Workspace`.

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


@compiled
def expert_feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work):
    """hidden += Σ share_e * expert_e(x) + gate * shared(x) with x = norm(hidden), every product with its deltas."""
    num_tokens, width = step.token_ids.shape[0], weights.final_norm.shape[0]
    mixture, scratch = weights.experts, work.experts
    place, pairs = mixture.place[layer], scratch.pairs
    num_pairs = num_tokens * pairs.experts.shape[1]
    hidden, normed = work.hidden[:num_tokens], work.normed[:num_tokens]
    norms, slots = extras.norms[layer, :, MLP_NORM], step.adapter_slots
    phase = rms_norm_with_extras(
        team, phase, hidden, weights.mlp_norm[layer], sizes.eps, norms, step.extra_slots, normed
    )
    phase = _single(
        team, phase, layer, place, normed, mixture.router, mixture.no_bias, tables.experts.router, tables.places,
        extras, step, work, scratch.logits[:num_tokens],
    )  # fmt: skip
    phase = route(team, phase, scratch.logits[:num_tokens], sizes.normalised, pairs)
    phase = sort_pairs(team, phase, num_tokens, pairs)
    phase = gather_pairs(team, phase, normed, num_tokens, pairs, scratch.inputs)

    rows, first = _expert_rows(tables.experts.gate_up, place), place * pairs.busy.shape[0]
    if slots.shape[0] > 0:
        phase = shrink_pairs(team, phase, scratch.inputs, num_pairs, pairs, slots, rows, scratch.shrunk)
    phase = experts_gate_and_up(
        team, phase, scratch.inputs, num_pairs, pairs, slots, mixture.gate_up, first, rows, scratch.shrunk, sizes.gelu,
        scratch.gate_up, scratch.gated,
    )  # fmt: skip
    rows = _expert_rows(tables.experts.down, place)
    if slots.shape[0] > 0:
        phase = shrink_pairs(team, phase, scratch.gated, num_pairs, pairs, slots, rows, scratch.shrunk)
    phase = experts_down(
        team, phase, scratch.gated, num_pairs, pairs, slots, mixture.down, first, rows, scratch.shrunk, scratch.outputs
    )
    if scratch.shared.shape[0] > 0:
        phase = _shared_expert(team, phase, layer, place, weights, sizes, tables, extras, step, work)
    shared = scratch.shared[: min(num_tokens, scratch.shared.shape[0])]
    gates = scratch.gates[: min(num_tokens, scratch.gates.shape[0]), 0]
    return combine(team, phase, scratch.outputs, pairs, shared, gates, width, hidden)


@compiled
def _shared_expert(team, phase, layer, place, weights, sizes, tables, extras, step, work):
    """What every token adds beside its experts, into the shared scratch, and its gate."""
    num_tokens, mixture, scratch = step.token_ids.shape[0], weights.experts, work.experts
    normed, gated = work.normed[:num_tokens], scratch.shared_gated[:num_tokens]
    shrunk, kept = work.shrunk[:num_tokens], work.kept[:num_tokens]
    runs, places, rows = step.runs, tables.places, tables.experts.shared_gate_up
    if scratch.gates.shape[0] > 0:
        phase = _single(
            team, phase, layer, place, normed, mixture.shared_gate, mixture.no_bias, tables.experts.shared_gate, places,
            extras, step, work, scratch.gates[:num_tokens],
        )  # fmt: skip
    if runs.shape[0] > 0:
        a, ranks = (rows.a[0][place], rows.a[1][place]), rows.ranks[place]
        phase = shrink(team, phase, normed, a, ranks, step.shrink_tasks, step.widest_rank, places, shrunk)
    phase = gate_and_up(
        team, phase, normed, layer_panels(mixture.shared_gate_up, place), mixture.no_bias, shrunk,
        (rows.b[0][place], rows.b[1][place]), rows.ranks[place], runs, places, upcoming_of(rows, place),
        ProductExtras(extras, layer, rows.first, step.extra_runs, kept), sizes.gelu,
        scratch.shared_gate_up[:num_tokens], gated,
    )  # fmt: skip
    return _single(
        team, phase, layer, place, gated, mixture.shared_down, mixture.no_bias, tables.experts.shared_down, places,
        extras, step, work, scratch.shared[:num_tokens],
    )  # fmt: skip


@compiled
def _single(team, phase, layer, place, x, stack, bias, rows, places, extras, step, work, out):
    """out = x @ w with the deltas of a product of one module. One phase, and one more with adapters."""
    num_tokens = x.shape[0]
    shrunk, kept, ranks = work.shrunk[:num_tokens], work.kept[:num_tokens], rows.ranks[place]
    if step.runs.shape[0] > 0:
        a = (rows.a[0][place],)
        phase = shrink(team, phase, x, a, ranks, step.shrink_tasks, step.widest_rank, places, shrunk)
    return project(
        team, phase, x, layer_panels(stack, place), bias, False, shrunk, (rows.b[0][place],), ranks, step.runs, places,
        upcoming_of(rows, place), ProductExtras(extras, layer, rows.first, step.extra_runs, kept), out,
    )  # fmt: skip


@compiled
def _expert_rows(rows, place):
    """Those of one layer."""
    return ExpertRows(rows.a[place], rows.b[place], rows.ranks[place], rows.in_bf16)
