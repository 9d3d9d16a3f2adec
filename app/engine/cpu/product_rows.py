"""Rank rows of one product, as the decoder's compiled functions read them.

In: tables stacked over the layers that have the product. Out: those of one layer. Numbers of layers are places in these
stacks: the layer's own number where every layer has the product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.compiled import compiled
from app.kernels.sgmv.cpu import ModuleRows
from app.kernels.sgmv.fetching import NextShrink


class ProductRows(NamedTuple):
    """Rank rows of one product's N modules: `ModuleRows` and `NextShrink` with an axis of layers before the others.

    a, b, ranks: [L, S, N]. first: the number of the first module in tables that count all of a layer's. upcoming: what
    the shrink after this product reads, for all layers; for the last product it is the first one's, of the next layer.
    """

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    ranks: NDArray[np.int32]
    num_panels: NDArray[np.int64]
    in_bf16: NDArray[np.bool_]
    first: int
    upcoming: NextShrink


@compiled
def rows_at(rows, place):
    """One layer's rows of a product."""
    return ModuleRows(rows.a[place], rows.b[place], rows.ranks[place], rows.num_panels, rows.in_bf16)


@compiled
def upcoming_of(rows, place):
    """One layer of what a product asks memory for."""
    upcoming = rows.upcoming
    return NextShrink(upcoming.a[place], upcoming.ranks[place], upcoming.depths, upcoming.in_bf16)
