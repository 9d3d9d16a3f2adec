"""A product of one module as the decoder's parts compute it, wherever its weights and rank rows lie.

In: rows, a stack of packed weights, adapters' rank rows, and the step. Out: the product with its deltas. A layer's
place is its index in the stack.
"""

from __future__ import annotations

from app.engine.cpu.product_rows import rows_at, upcoming_of
from app.kernels.linear.cpu import ProductExtras, project
from app.kernels.machine.compiled import compiled
from app.kernels.matmul.quantised import layer_panels
from app.kernels.moe_lora.cpu import ExpertRows
from app.kernels.sgmv.cpu import shrink


@compiled
def single_product(team, phase, layer, place, x, stack, bias, rows, extras, step, work, out):
    """out = x @ w with the deltas of a product of one module. One phase, and one more with adapters."""
    num_tokens = x.shape[0]
    shrunk, kept, own = work.shrunk[:num_tokens], work.kept[:num_tokens], rows_at(rows, place)
    if step.runs.shape[0] > 0:
        phase = shrink(team, phase, x, own, step.shrink_tasks, step.widest_rank, shrunk)
    return project(
        team, phase, x, layer_panels(stack, place), bias, False, shrunk, own, step.runs, upcoming_of(rows, place),
        ProductExtras(extras, layer, rows.first, step.extra_runs, kept), out,
    )  # fmt: skip


@compiled
def rows_of_layer(rows, place):
    """Those of one layer."""
    return ExpertRows(rows.a[place], rows.b[place], rows.ranks[place], rows.in_bf16)
