"""A product of one module as the decoder's parts compute it, wherever its weights and rank rows lie.

In: rows, a stack of packed weights, adapters' rank rows, and the step. Out: the product with its deltas. A layer's
place is its index in the stack.
"""

from __future__ import annotations

from app.engine.cpu.product_rows import upcoming_of
from app.kernels.linear.cpu import ProductExtras, project
from app.kernels.machine.compiled import compiled
from app.kernels.matmul.quantised import layer_panels
from app.kernels.moe_lora.cpu import ExpertRows
from app.kernels.sgmv.cpu import shrink


@compiled
def single_product(team, phase, layer, place, x, stack, bias, rows, places, extras, step, work, out):
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
def rows_of_layer(rows, place):
    """Those of one layer."""
    return ExpertRows(rows.a[place], rows.b[place], rows.ranks[place], rows.in_bf16)
