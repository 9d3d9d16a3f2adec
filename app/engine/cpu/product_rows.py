"""Rank rows of one product, as the decoder's compiled functions read them.

In: tables stacked over the layers that have the product. Out: those of one layer. Numbers of layers are places in these
stacks: the layer's own number where every layer has the product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.compiled import compiled
from app.kernels.sgmv.fetching import NextShrink

Floats = NDArray[np.float32]


class ProductRows(NamedTuple):
    """Rank rows of one product's N targets: see `app.kernels.sgmv.cpu`.

    a: panels [L, R / 8, d_in, 8] of each target; b: [L, R, W] of each. ranks: [L, S, N] int32. first: the number of the
    first target in tables that count all of a layer's. upcoming: what the shrink after this product reads, for all
    layers; for the last product it is the first one's, of the next layer.
    """

    a: tuple[Floats, ...]
    b: tuple[Floats, ...]
    ranks: NDArray[np.int32]
    first: int
    upcoming: NextShrink


@compiled
def three(tables, place):
    """One layer of three stacked tables."""
    return tables[0][place], tables[1][place], tables[2][place]


@compiled
def upcoming_of(rows, place):
    """One layer of what a product asks memory for."""
    return NextShrink(three(rows.upcoming.tables, place), rows.upcoming.ranks[place])
