"""Adapters' rows that are read soon, as lists for products to ask memory for on their way (`multiply_tile`).

In: the tables, ranks and runs of `cpu`. Out: addresses of blocks of FETCH_BLOCK bytes. A product of few rows leaves
memory idle, and the rows that follow it, a piece here and a piece there, are read slower than memory can
give them unless it is asked in time. What is listed changes when bytes arrive, never what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.compiled import compiled
from app.kernels.machine.simd import FETCH_BLOCK
from app.kernels.matmul.cpu import PANEL, Fetch
from app.kernels.sgmv.cpu import RANK_PANEL, address_and_width, first_panel

#: Blocks of one list: half of a usual second cache.
MOST_BLOCKS = 2048


class NextShrink(NamedTuple):
    """What the shrink after a product reads: tables of a for `ranks` [S, N]. Always three tables; those past N are not
    read."""

    tables: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
    ranks: NDArray[np.int32]


@compiled
def shrink_ranges(upcoming, runs, places):
    """[G * N, 2] int64: addresses and bytes of the rows that `shrink` will read; runs and places as there."""
    tables, ranks = upcoming
    num_runs, num_tables = runs.shape[0], ranks.shape[1]
    ranges = np.zeros((num_runs * num_tables, 2), np.int64)
    for n in range(num_tables):
        a, depth = address_and_width(tables, n)
        for g in range(num_runs):
            adapter_slot = runs[g, 2]
            size = 2 if places.in_bf16[adapter_slot] else 4
            rows = -(-ranks[adapter_slot, n] // RANK_PANEL) * RANK_PANEL
            ranges[n * num_runs + g, 0] = a + places.starts[adapter_slot] * depth * 4
            ranges[n * num_runs + g, 1] = rows * depth * size
    return ranges


@compiled
def list_fetch(tables, ranks, runs, places, first, end, num_panels, soon, blocks):
    """A `Fetch` of what follows the product of panels first to end of modules that lie side by side in num_panels.

    That is their rows of b (arguments as in `expand_panels`), and these panels' share of the ranges `soon` [., 2].
    The list is written to blocks [MOST_BLOCKS] int64; what it has no room for is not asked for.
    """
    count, at = 0, 0
    for n in range(ranks.shape[1]):
        b, width = address_and_width(tables, n)
        low, high = max(first - at, 0), min(end - at, width // PANEL)
        if low < high:
            for g in range(runs.shape[0]):
                adapter_slot = runs[g, 2]
                rank, size = ranks[adapter_slot, n], 2 if places.in_bf16[adapter_slot] else 4
                rows = b + first_panel(rank, places, adapter_slot, width, low)
                count = _list(rows, 0, _num_blocks((high - low) * rank * PANEL * size), blocks, count)
        at += width // PANEL
    total, before = 0, 0
    for i in range(soon.shape[0]):
        total += _num_blocks(soon[i, 1])
    low, high = total * first // num_panels, total * end // num_panels
    for i in range(soon.shape[0]):
        size = _num_blocks(soon[i, 1])
        count = _list(soon[i, 0], max(low - before, 0), min(high - before, size), blocks, count)
        before += size
    return Fetch(np.int64(blocks.ctypes.data), count * (FETCH_BLOCK // 64))


@compiled
def _num_blocks(num_bytes):
    return (num_bytes + FETCH_BLOCK - 1) // FETCH_BLOCK


@compiled
def _list(address, first, end, blocks, count):
    """Append blocks first to end behind `address`; returns the list's length."""
    for i in range(first, min(end, first + blocks.shape[0] - count)):
        blocks[count] = address + i * FETCH_BLOCK
        count += 1
    return count
