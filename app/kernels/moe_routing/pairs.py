"""Pairs of a token and one of its experts, sorted by expert, as the device kernels pass them on.

A pair is t * K + k: token t's k-th expert. The numbers of pairs and tiles follow from shapes alone, and the chosen
experts are data, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SortedPairs(NamedTuple):
    """P = T * K pairs of E experts.

    order: [P] int32, the pairs by expert, then by token. tiles: [G, 3] int32: first place in that order, number of
    places (0: an unused tile), and their expert. top_k: K. block_rows: the most places of a tile.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    top_k: int
    block_rows: int
