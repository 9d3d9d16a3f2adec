"""LoRA deltas of single rows on the GPU (BGMV): shrink h = A x, expand y += B h, where every row has its own adapter.

Deltas are added to the base product in place. Both steps read each rank row once, in full lines, and multiply in
float32 without tensor cores: one row has nothing to share a tile with, so the time is the bytes of the adapters in use.
A row of the base (rank 0) exits before it reads anything but its rank; no row pays for a larger rank in the batch.

The shrink splits d_in over programs. Each split stores its partial sum and the expand adds them in order: no atomics,
no buffer to clear, the same bits every time. Runs of rows with one adapter are faster in `sgmv`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from app.kernels.lora_rows import START_MULTIPLE, RankRows, check_operands
from app.kernels.tuning import ENOUGH_PROGRAMS, ceil_div, next_power_of_two, shape_key, tuned_config


class Configuration(NamedTuple):
    """Static arguments: tiles of block_rank x block_k (shrink) and block_rank x block_columns (expand).

    num_splits cut d_in; num_parts programs share an adapter's rank blocks.
    """

    block_rank: int
    block_k: int
    num_splits: int
    num_parts: int
    shrink_warps: int
    block_columns: int
    expand_warps: int


def configuration(num_rows: int, rows: RankRows, max_rank: int) -> Configuration:
    """The configuration of `add_lora` for these shapes: measured on this device, or the rule of thumb.

    The rule: tiles of 16 rank rows and 512 bytes of each; then enough splits to occupy a whole GPU.
    """
    width, num_slices = sum(rows.widths), len(rows.widths)
    bucket = next_power_of_two(num_rows)
    if (found := tuned_config(rows.memory.device, key(num_rows, rows, max_rank))) is not None:
        return Configuration(**found)
    block_rank = min(next_power_of_two(max_rank), 16)
    num_parts = min(ceil_div(max_rank, block_rank), 4)
    block_k = min(next_power_of_two(rows.depth), 256)
    num_splits = 1
    while num_splits < 16 and num_splits * block_k < rows.depth and bucket * num_slices * num_splits < ENOUGH_PROGRAMS:
        num_splits *= 2
    block_columns = min(next_power_of_two(max(rows.widths)), 512)
    while block_columns > 128 and bucket * ceil_div(width, block_columns) < ENOUGH_PROGRAMS:
        block_columns //= 2
    return Configuration(block_rank, block_k, num_splits, num_parts, 4, block_columns, 4)


def key(num_rows: int, rows: RankRows, max_rank: int) -> str:
    """The key of a measured configuration for these shapes."""
    sizes = (next_power_of_two(num_rows), rows.depth, sum(rows.widths), len(rows.widths), max_rank)
    return shape_key("bgmv", *sizes, dtype=rows.memory.dtype)


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    rows: RankRows,
    slots: torch.Tensor,
    *,
    max_rank: int,
    config: Configuration | None = None,
) -> None:
    """y[t] += B (A x[t]) for the adapter of slots[t], in place (Hu et al. 2021; Chen et al. 2023).

    x: [T, d_in]. y: [T, W]. slots: [T] int32 or int64, 0 for the base. max_rank: at least every rank in
    `rows.ranks`; it sizes the workspace. Raises ValueError for operands that do not fit.
    """
    num_rows = slots.shape[0]
    check_operands(x, y, rows, num_rows)
    if num_rows == 0:
        return
    c = config or configuration(num_rows, rows, max_rank)
    num_slices, width, depth = len(rows.widths), sum(rows.widths), rows.depth
    capacity = ceil_div(max_rank, 16) * 16
    h = torch.empty((c.num_splits, num_slices, num_rows, capacity), dtype=torch.float32, device=x.device)
    _shrink_rows[(num_rows, num_slices, c.num_splits * c.num_parts)](
        x, rows.memory, h, slots, rows.a_starts, rows.ranks, x.stride(0), num_rows, CAPACITY=capacity, DEPTH=depth,
        NUM_SLICES=num_slices, MULTIPLE=START_MULTIPLE, BLOCK_RANK=c.block_rank, BLOCK_K=c.block_k,
        NUM_SPLITS=c.num_splits, NUM_PARTS=c.num_parts, num_warps=c.shrink_warps, enable_fp_fusion=True,
    )  # fmt: skip
    tiles = [ceil_div(w, c.block_columns) for w in rows.widths] + [0, 0]
    starts = [sum(rows.widths[:n]) for n in range(num_slices)] + [width, width]
    _expand_rows[(sum(tiles), num_rows)](
        h, rows.memory, y, slots, rows.b_starts, rows.ranks, num_rows, y.stride(0),
        NUM_SLICES=num_slices, TILES_0=tiles[0], TILES_1=tiles[1], START_1=starts[1], START_2=starts[2], WIDTH=width,
        CAPACITY=capacity, MULTIPLE=START_MULTIPLE, BLOCK_RANK=c.block_rank, BLOCK_COLUMNS=c.block_columns,
        NUM_SPLITS=c.num_splits, num_warps=c.expand_warps, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # or a new number of rows could trigger a compilation
def _shrink_rows(
    x, memory, h, slots, a_starts, ranks, x_row, num_rows,
    CAPACITY: tl.constexpr, DEPTH: tl.constexpr, NUM_SLICES: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """h[split, n, t, :rank] = A_n[:, k range of split] @ x[t]. Grid: (T, N, NUM_SPLITS * NUM_PARTS)."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    split = (tl.program_id(2) % NUM_SPLITS).to(tl.int64)
    part = tl.program_id(2) // NUM_SPLITS
    adapter = tl.load(slots + t).to(tl.int64)
    rank = tl.load(ranks + adapter * NUM_SLICES + n)
    if rank <= part * BLOCK_RANK:
        return
    # Splits are whole blocks of k, so that every load but the last is full.
    SPAN: tl.constexpr = (DEPTH + NUM_SPLITS * BLOCK_K - 1) // (NUM_SPLITS * BLOCK_K) * BLOCK_K
    first = tl.multiple_of(tl.load(a_starts + adapter * NUM_SLICES + n), MULTIPLE)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_RANK)
    x_start = x + t * x_row + split * SPAN
    for r0 in range(part * BLOCK_RANK, rank, NUM_PARTS * BLOCK_RANK):
        live = r0 + r < rank
        a_start = memory + first + (r0 + r.to(tl.int64)) * DEPTH + split * SPAN  # [BLOCK_RANK]
        sums = tl.zeros((BLOCK_RANK, BLOCK_K), tl.float32)
        for k0 in range(0, SPAN, BLOCK_K):
            inside = split * SPAN + k0 + k < DEPTH
            x_part = tl.load(x_start + k0 + k, mask=inside, other=0.0).to(tl.float32)
            a_part = tl.load(a_start[:, None] + (k0 + k)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            sums += a_part.to(tl.float32) * x_part[None, :]
        to = h + ((split * NUM_SLICES + n) * num_rows + t) * CAPACITY + r0 + r
        tl.store(to, tl.sum(sums, axis=1), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_rows(
    h, memory, y, slots, b_starts, ranks, num_rows, y_row,
    NUM_SLICES: tl.constexpr, TILES_0: tl.constexpr, TILES_1: tl.constexpr, START_1: tl.constexpr,
    START_2: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """y[t, tile] += B_n h[t, n], n the slice the tile lies in. Grid: (tiles of all slices, T)."""
    tile = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    n, start, column, width = slice_of_tile(tile, TILES_0, TILES_1, START_1, START_2, WIDTH, BLOCK_COLUMNS)
    adapter = tl.load(slots + t).to(tl.int64)
    rank = tl.load(ranks + adapter * NUM_SLICES + n)
    if rank == 0:
        return
    first = tl.multiple_of(tl.load(b_starts + adapter * NUM_SLICES + n), MULTIPLE)
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    inside = columns < width
    r = tl.arange(0, BLOCK_RANK)
    delta = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for r0 in range(0, rank, BLOCK_RANK):
        live = r0 + r < rank
        shrunk = tl.zeros((BLOCK_RANK,), tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            h_at = h + ((split * NUM_SLICES + n) * num_rows + t) * CAPACITY + r0 + r
            shrunk += tl.load(h_at, mask=live, other=0.0)
        b_start = memory + first + (r0 + r.to(tl.int64)) * width
        b_part = tl.load(b_start[:, None] + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        delta += tl.sum(b_part.to(tl.float32) * shrunk[:, None], axis=0)
    out = tl.load(y + t * y_row + start + columns, mask=inside, other=0.0).to(tl.float32) + delta
    tl.store(y + t * y_row + start + columns, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def slice_of_tile(
    tile, TILES_0: tl.constexpr, TILES_1: tl.constexpr, START_1: tl.constexpr, START_2: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """(slice, its start in y, first column in it, its width) of a column tile; none crosses into the next slice."""
    second = tile >= TILES_0
    third = tile >= TILES_0 + TILES_1
    n = second.to(tl.int64) + third.to(tl.int64)
    local = tile - tl.where(third, TILES_0 + TILES_1, tl.where(second, TILES_0, 0))
    start = tl.where(third, START_2, tl.where(second, START_1, 0))
    width = tl.where(third, WIDTH - START_2, tl.where(second, START_2 - START_1, START_1))
    return n, start.to(tl.int64), (local * BLOCK_COLUMNS).to(tl.int64), width.to(tl.int64)
