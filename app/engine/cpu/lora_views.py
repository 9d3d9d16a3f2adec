"""Rank rows of one linear module as the decoder's compiled functions read them, and the product with its LoRA.

The tables are stacked over the layers that have the module; a layer's index (stacked_layer) counts these layers only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.linear.cpu import LinearExtras, LinearLora, project
from app.kernels.machine.jit import jit
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.int8 import layer_panels
from app.kernels.moe_lora.cpu import ExpertRows
from app.kernels.sgmv.cpu import ModuleRows
from app.kernels.sgmv.prefetch import NextShrink


def padded_width(size: int) -> int:
    """Columns of a product of this size as kernels store it: the next multiple of a panel's width."""
    return -(-size // PANEL) * PANEL


class LoraView(NamedTuple):
    """Rank rows of one linear module's N targets: `ModuleRows` and `NextShrink` with a leading axis of layers.

    a, b, ranks: [L, S, N]. first: the number of the first target in tables that count all of a layer's. upcoming: what
    the shrink after this product reads, for all layers; for the last product it is the first one's of the next layer.
    """

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    ranks: NDArray[np.int32]
    num_panels: NDArray[np.int64]
    in_bf16: NDArray[np.bool_]
    first: int
    upcoming: NextShrink


@jit
def lora_at(rows, stacked_layer, later, step, work):
    """One layer's rows, with a step's runs. later: the layer of the shrink that follows."""
    upcoming, a, b, ranks = rows.upcoming, rows.a[stacked_layer], rows.b[stacked_layer], rows.ranks[stacked_layer]
    return LinearLora(
        ModuleRows(a, b, ranks, rows.num_panels, rows.in_bf16),
        NextShrink(upcoming.a[later], upcoming.ranks[later], upcoming.depths, upcoming.in_bf16),
        step.runs, step.shrink_tasks, step.widest_rank, work.shrunk,
    )  # fmt: skip


@jit
def single_product(team, phase, layer, stacked_layer, x, stack, bias, rows, extras, step, work, out):
    """out = x @ w with the LoRA of a linear module with one target. One phase, and one more with adapters."""
    return project(
        team, phase, x, layer_panels(stack, stacked_layer), bias, False,
        lora_at(rows, stacked_layer, stacked_layer, step, work),
        LinearExtras(extras, layer, rows.first, step.extra_runs, work.saved[: x.shape[0]]), out,
    )  # fmt: skip


@jit
def rows_of_layer(rows, stacked_layer):
    """Rank rows of one layer, in the form that `moe_lora` reads."""
    return ExpertRows(rows.a[stacked_layer], rows.b[stacked_layer], rows.ranks[stacked_layer], rows.in_bf16)
