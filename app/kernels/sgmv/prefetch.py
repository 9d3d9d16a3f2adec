"""Prefetch lists of adapters' rows that are read soon, for products to fetch along the way (`multiply_tile`).

A list holds addresses of blocks of FETCH_BLOCK bytes. A product of few rows leaves memory idle, and the scattered rows
that follow it are read slower than memory can deliver them unless they are prefetched. A list changes when bytes
arrive, never what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import FETCH_BLOCK
from app.kernels.matmul.cpu import PANEL, Fetch
from app.kernels.sgmv.cpu import RANK_PANEL, first_panel

#: Blocks of one list: half of a common second-level cache.
MOST_BLOCKS = 2048


class NextShrink(NamedTuple):
    """Inputs of the shrink after a product: addresses of a, and ranks, [S, N] as in `ModuleRows`.

    depths: [N] int64, each module's d_in. in_bf16: [S] bool.
    """

    a: NDArray[np.int64]
    ranks: NDArray[np.int32]
    depths: NDArray[np.int64]
    in_bf16: NDArray[np.bool_]


@jit
def shrink_ranges(upcoming, runs):
    """[G * N, 2] int64: addresses and bytes of the rows that `shrink` will read for these runs."""
    num_runs, num_modules = runs.shape[0], upcoming.ranks.shape[1]
    ranges = np.zeros((num_runs * num_modules, 2), np.int64)
    for n in range(num_modules):
        for g in range(num_runs):
            adapter_slot = runs[g, 2]
            size = 2 if upcoming.in_bf16[adapter_slot] else 4
            count = -(-upcoming.ranks[adapter_slot, n] // RANK_PANEL) * RANK_PANEL
            ranges[n * num_runs + g, 0] = upcoming.a[adapter_slot, n]
            ranges[n * num_runs + g, 1] = count * upcoming.depths[n] * size
    return ranges


@jit
def list_fetch(rows, runs, first, end, num_panels, soon, blocks):
    """A `Fetch` of the reads after the product of panels first to end of modules that lie side by side in num_panels.

    These are their rows of b (arguments as in `expand_panels`), and these panels' part of the ranges `soon` [., 2]. The
    list is written to blocks [MOST_BLOCKS] int64; what does not fit is not prefetched.
    """
    count, at = 0, 0
    for n in range(rows.ranks.shape[1]):
        width = rows.num_panels[n]
        low, high = max(first - at, 0), min(end - at, width)
        if low < high:
            for g in range(runs.shape[0]):
                adapter_slot = runs[g, 2]
                size = (high - low) * rows.ranks[adapter_slot, n] * PANEL * (2 if rows.in_bf16[adapter_slot] else 4)
                count = _list(first_panel(rows, adapter_slot, n, low), 0, _num_blocks(size), blocks, count)
        at += width
    total, before = 0, 0
    for i in range(soon.shape[0]):
        total += _num_blocks(soon[i, 1])
    low, high = total * first // num_panels, total * end // num_panels
    for i in range(soon.shape[0]):
        size = _num_blocks(soon[i, 1])
        count = _list(soon[i, 0], max(low - before, 0), min(high - before, size), blocks, count)
        before += size
    return Fetch(np.int64(blocks.ctypes.data), count * (FETCH_BLOCK // 64))


@jit
def _num_blocks(num_bytes):
    return (num_bytes + FETCH_BLOCK - 1) // FETCH_BLOCK


@jit
def _list(address, first, end, blocks, count):
    """Append blocks first to end behind `address`; returns the list's length."""
    for i in range(first, min(end, first + blocks.shape[0] - count)):
        blocks[count] = address + i * FETCH_BLOCK
        count += 1
    return count
