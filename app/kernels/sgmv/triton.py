"""LoRA deltas of runs of rows on the GPU (SGMV): shrink h = A x, expand y += B h, per segment of rows with one adapter.

Deltas are added to the base product in place; segments are cut on the host. A segment is one tile of tensor-core
products with its adapter's rank rows, read in place; ranks that are no multiple of a tile are masked, rows of the base
are in no segment. All shapes are fixed by the configuration; the numbers of rows, adapters and ranks are data.

A tile's rows do not affect each other, and sums over d_in and rank run in one order. The expand adds the splits of d_in
in order, without atomics. With `batch_invariant=True` the tiles depend on the module alone, so a row has the same bits
in any batch, in a prefill chunk and in decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from app.kernels.bgmv.triton import slice_of_tile
from app.kernels.lora_rows import START_MULTIPLE, RankRows, check_operands
from app.kernels.tuning import ENOUGH_PROGRAMS, ceil_div, next_power_of_two, shape_key, tuned_config

#: Rows per segment in batch-invariant mode and while decoding: the smallest tensor-core tile.
MIN_BLOCK_TOKENS = 16


class Configuration(NamedTuple):
    """Static arguments: tiles of block_tokens x block_k x block_rank (shrink), x block_rank x block_columns (expand).

    num_splits cut d_in; num_parts programs share an adapter's rank blocks; num_stages of the shrink's loop.
    """

    block_rank: int
    block_k: int
    block_columns: int
    num_splits: int
    num_parts: int
    shrink_warps: int
    expand_warps: int
    num_stages: int


def block_tokens(num_tokens: int, *, batch_invariant: bool = False) -> int:
    """The most rows of a segment, in a step of num_tokens rows."""
    if batch_invariant or num_tokens <= 256:
        return MIN_BLOCK_TOKENS
    return 32 if num_tokens <= 1024 else 64


def max_segments(num_tokens: int, num_runs: int, block_tokens: int) -> int:
    """The most segments that num_tokens rows in num_runs runs can need."""
    num_runs = min(num_tokens, num_runs)
    return num_runs + (num_tokens - num_runs) // block_tokens


def segments(
    run_starts: NDArray[np.integer], run_adapter_slots: NDArray[np.integer], block_tokens: int
) -> NDArray[np.int32]:
    """[G, 3] (first row, number of rows, adapter slot): the runs cut into pieces; runs of slot 0 are left out.

    run_starts: [runs + 1]. run_adapter_slots: [runs].
    """
    of_adapters = run_adapter_slots != 0
    starts, lengths = run_starts[:-1][of_adapters], np.diff(run_starts)[of_adapters]
    counts = -(-lengths // block_tokens)
    run = np.repeat(np.arange(len(counts)), counts)  # [G]
    offset = (np.arange(len(run)) - (np.cumsum(counts) - counts)[run]) * block_tokens
    sizes = np.minimum(lengths[run] - offset, block_tokens)
    return np.stack([starts[run] + offset, sizes, run_adapter_slots[of_adapters][run]], axis=1).astype(np.int32)


def configuration(
    num_segments: int, block_tokens: int, rows: RankRows, max_rank: int, *, batch_invariant: bool = False
) -> Configuration:
    """The configuration of `add_lora` for these shapes: measured on this device, or the rule of thumb.

    Rule: one block holds the whole rank up to 64, and d_in is split until there is work for a whole GPU; but every tile
    of the expand reads all splits, so long or many segments get few. In batch-invariant mode neither the number of
    segments counts nor, for the tiles, the largest rank.
    """
    width, num_slices = sum(rows.widths), len(rows.widths)
    if not batch_invariant:
        found = tuned_config(rows.memory.device, key(num_segments, block_tokens, rows, max_rank))
        if found is not None:
            return Configuration(**found)
    block_rank = 16 if batch_invariant else min(max(next_power_of_two(max_rank), 16), 64)
    num_parts = min(ceil_div(max_rank, block_rank), 4)
    block_k = 128 if rows.memory.dtype.itemsize == 2 else 64
    if batch_invariant:
        wanted_splits, block_columns = 4, 128
    else:
        wanted_splits = min(
            ENOUGH_PROGRAMS // (num_segments * num_slices), 16 if block_tokens == MIN_BLOCK_TOKENS else 2
        )
        block_columns = 128 if num_segments * ceil_div(width, 128) >= ENOUGH_PROGRAMS else 64
    num_splits = 1
    while 2 * num_splits <= wanted_splits and 2 * num_splits * block_k <= rows.depth:
        num_splits *= 2
    expand_warps = 8 if block_tokens * block_columns >= 8192 else 4
    return Configuration(block_rank, block_k, block_columns, num_splits, num_parts, 4, expand_warps, 3)


def key(num_segments: int, block_tokens: int, rows: RankRows, max_rank: int) -> str:
    """The key of a measured configuration for these shapes."""
    shape = (rows.depth, sum(rows.widths), len(rows.widths), max_rank)
    return shape_key("sgmv", next_power_of_two(num_segments), block_tokens, *shape, dtype=rows.memory.dtype)


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    rows: RankRows,
    segments: torch.Tensor,
    *,
    max_rank: int,
    block_tokens: int,
    batch_invariant: bool = False,
    config: Configuration | None = None,
) -> None:
    """y[t] += B (A x[t]) for the rows of every segment, in place (Hu et al. 2021; Chen et al. 2023).

    x: [T, d_in]. y: [T, W]. segments: [G, 3] int32, see `segments`; unused ones have no rows. block_tokens: what
    segments were cut with. max_rank: at least every rank in `rows.ranks`. Raises ValueError for operands that do not
    fit.
    """
    num_rows, num_segments = y.shape[0], segments.shape[0]
    check_operands(x, y, rows, num_rows)
    if segments.shape[1:] != (3,) or segments.stride() != (3, 1):
        raise ValueError(f"segments are {tuple(segments.shape)}, expected contiguous [G, 3]")
    if num_rows == 0 or num_segments == 0:
        return
    c = config or configuration(num_segments, block_tokens, rows, max_rank, batch_invariant=batch_invariant)
    num_slices, width, depth = len(rows.widths), sum(rows.widths), rows.depth
    capacity = ceil_div(max_rank, 16) * 16
    h = torch.empty((c.num_splits, num_slices, num_rows, capacity), dtype=torch.float32, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"  # no effect for half types
    _shrink_segments[(num_segments, num_slices, c.num_splits * c.num_parts)](
        x, rows.memory, h, segments, rows.a_starts, rows.ranks, x.stride(0), num_rows, CAPACITY=capacity, DEPTH=depth,
        NUM_SLICES=num_slices, MULTIPLE=START_MULTIPLE, BLOCK_TOKENS=block_tokens,
        BLOCK_RANK=c.block_rank, BLOCK_K=c.block_k, NUM_SPLITS=c.num_splits, NUM_PARTS=c.num_parts,
        PRECISION=precision, num_warps=c.shrink_warps, num_stages=c.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    tiles = [ceil_div(w, c.block_columns) for w in rows.widths] + [0, 0]
    starts = [sum(rows.widths[:n]) for n in range(num_slices)] + [width, width]
    _expand_segments[(sum(tiles), num_segments)](
        h, rows.memory, y, segments, rows.b_starts, rows.ranks, num_rows, y.stride(0),
        NUM_SLICES=num_slices, TILES_0=tiles[0], TILES_1=tiles[1], START_1=starts[1], START_2=starts[2], WIDTH=width,
        CAPACITY=capacity, MULTIPLE=START_MULTIPLE, BLOCK_TOKENS=block_tokens, BLOCK_RANK=c.block_rank,
        BLOCK_COLUMNS=c.block_columns, NUM_SPLITS=c.num_splits, PRECISION=precision, num_warps=c.expand_warps,
        enable_fp_fusion=True,
        num_stages=1,  # the loop runs once for most ranks: nothing to prefetch
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # or a new number of rows could trigger a compilation
def _shrink_segments(
    x, memory, h, segments, a_starts, ranks, x_row, num_rows,
    CAPACITY: tl.constexpr, DEPTH: tl.constexpr, NUM_SLICES: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr, NUM_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """h[split, n, row, :rank] = A_n[:, k range of split] @ x[row]. Grid: (G, N, NUM_SPLITS * NUM_PARTS)."""
    g = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    split = (tl.program_id(2) % NUM_SPLITS).to(tl.int64)
    part = tl.program_id(2) // NUM_SPLITS
    count = tl.load(segments + 3 * g + 1)
    if count == 0:
        return
    adapter = tl.load(segments + 3 * g + 2).to(tl.int64)
    rank = tl.load(ranks + adapter * NUM_SLICES + n)
    if rank <= part * BLOCK_RANK:
        return
    SPAN: tl.constexpr = (DEPTH + NUM_SPLITS * BLOCK_K - 1) // (NUM_SPLITS * BLOCK_K) * BLOCK_K
    first = tl.multiple_of(tl.load(a_starts + adapter * NUM_SLICES + n), MULTIPLE)
    token = tl.arange(0, BLOCK_TOKENS)
    mine = token < count
    row = tl.load(segments + 3 * g).to(tl.int64) + token  # [BLOCK_TOKENS]
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_RANK)
    x_start = x + row * x_row + split * SPAN
    for r0 in range(part * BLOCK_RANK, rank, NUM_PARTS * BLOCK_RANK):
        live = r0 + r < rank
        a_start = memory + first + (r0 + r.to(tl.int64)) * DEPTH + split * SPAN
        sums = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), tl.float32)
        for k0 in range(0, SPAN, BLOCK_K):
            inside = split * SPAN + k0 + k < DEPTH
            x_tile = tl.load(x_start[:, None] + (k0 + k)[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            a_tile = tl.load(a_start[None, :] + (k0 + k)[:, None], mask=live[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
        h_rows = (split * NUM_SLICES + n) * num_rows + row
        to = h + h_rows[:, None] * CAPACITY + (r0 + r)[None, :]
        tl.store(to, sums, mask=mine[:, None] & live[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_segments(
    h, memory, y, segments, b_starts, ranks, num_rows, y_row,
    NUM_SLICES: tl.constexpr, TILES_0: tl.constexpr, TILES_1: tl.constexpr,
    START_1: tl.constexpr, START_2: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[row, tile] += B_n h[n, row], n the slice of the tile. Grid: (tiles of all slices, G)."""
    tile = tl.program_id(0)
    g = tl.program_id(1)
    count = tl.load(segments + 3 * g + 1)
    if count == 0:
        return
    n, start, column, width = slice_of_tile(tile, TILES_0, TILES_1, START_1, START_2, WIDTH, BLOCK_COLUMNS)
    adapter = tl.load(segments + 3 * g + 2).to(tl.int64)
    rank = tl.load(ranks + adapter * NUM_SLICES + n)
    if rank == 0:
        return
    first = tl.multiple_of(tl.load(b_starts + adapter * NUM_SLICES + n), MULTIPLE)
    token = tl.arange(0, BLOCK_TOKENS)
    mine = token < count
    row = tl.load(segments + 3 * g).to(tl.int64) + token  # [BLOCK_TOKENS]
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    inside = columns < width
    r = tl.arange(0, BLOCK_RANK)
    delta = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    for r0 in range(0, rank, BLOCK_RANK):
        live = r0 + r < rank
        shrunk = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            h_rows = (split * NUM_SLICES + n) * num_rows + row
            h_at = h + h_rows[:, None] * CAPACITY + (r0 + r)[None, :]
            shrunk += tl.load(h_at, mask=mine[:, None] & live[None, :], other=0.0)
        b_start = memory + first + (r0 + r.to(tl.int64)) * width
        b_tile = tl.load(b_start[:, None] + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        delta = tl.dot(shrunk.to(memory.dtype.element_ty), b_tile, delta, input_precision=PRECISION)
    at = y + row[:, None] * y_row + (start + columns)[None, :]
    written = mine[:, None] & inside[None, :]
    out = tl.load(at, mask=written, other=0.0).to(tl.float32) + delta
    tl.store(at, out.to(y.dtype.element_ty), mask=written)
