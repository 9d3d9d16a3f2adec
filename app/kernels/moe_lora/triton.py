"""Experts' linear modules and their LoRA deltas on the GPU: one tile of rows, all of one expert, at a time.

Pairs are sorted by expert (`app.kernels.moe_routing`). Every pair passes its own expert with its own adapter's delta of
that expert: before the activation for gate and up, before the weighted sum for down. An expert that no token chose is
not read. A tile may hold rows of several adapters: each adapter's rows are multiplied with its own matrices, one
adapter after the other, and an adapter that does not change the expert costs the load of a rank.

Tiles have one size per type, sums over the input and over ranks run in one order, nothing is added by atomics:
batch-invariant in both modes of the engine. Grids follow from shapes, so a step can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.lora_rows import ALIGNMENT, ExpertRows, check_expert_operands
from app.kernels.moe_routing.pairs import SortedPairs
from app.kernels.tuning import ceil_div

#: Rank rows per tensor-core product, and columns per expand.
_BLOCK_RANK, _LORA_COLUMNS = 16, 128


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    pairs: SortedPairs,
    bias: torch.Tensor | None = None,
    *,
    x_divisor: int = 1,
) -> None:
    """out[p] = W_e x[p // x_divisor] + bias_e of every pair's expert e, in place; float32 sums, one rounding.

    x: [P / x_divisor, d_in]; weight: [E, W, d_in], contiguous; out: [P, W]; bias: [E, W]. ValueError for operands that
    do not fit.
    """
    _, width, depth = weight.shape
    check_expert_operands(x, out, pairs, depth, width, x_divisor)
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        raise ValueError("weights and biases of experts must be contiguous")
    num_tiles = len(pairs.tiles)
    if num_tiles == 0:
        return
    block_columns, block_k = (64, 64) if x.dtype.itemsize == 2 else (64, 32)
    # Tiles of one expert are neighbours, and run at the same time: its weights are read from memory once.
    _expert_product[(num_tiles, ceil_div(width, block_columns))](
        x, weight, out, weight if bias is None else bias, pairs.order, pairs.tiles, x.stride(0), out.stride(0),
        WIDTH=width, DEPTH=depth, X_DIVISOR=x_divisor, HAS_BIAS=bias is not None, BLOCK_ROWS=pairs.block_rows,
        BLOCK_COLUMNS=block_columns, BLOCK_K=block_k, PRECISION=_precision(x), num_warps=4, num_stages=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def add_lora(
    x: torch.Tensor,
    out: torch.Tensor,
    rows: ExpertRows,
    slots: torch.Tensor,
    pairs: SortedPairs,
    *,
    max_rank: int,
    x_divisor: int = 1,
) -> None:
    """out[p] += B A x[p // x_divisor], of adapter slots[p // K] and of pair p's expert, in place (Hu et al. 2021).

    slots: [T] int32, 0 for the base. max_rank: at least every rank in `rows.ranks`; it sizes the workspace. The rest as
    for `expert_linear`. ValueError for operands that do not fit.
    """
    num_experts, num_modules = rows.ranks.shape[1:]
    check_expert_operands(x, out, pairs, rows.depth, num_modules * rows.width, x_divisor)
    num_pairs, num_tiles = len(pairs.order), len(pairs.tiles)
    if slots.shape != (num_pairs // pairs.top_k,) or not all(t.is_contiguous() for t in rows[:3]):
        raise ValueError(
            f"{tuple(slots.shape)} adapter slots for {num_pairs} pairs of {pairs.top_k}; tables are contiguous"
        )
    if num_tiles == 0:
        return
    capacity = ceil_div(max_rank, _BLOCK_RANK) * _BLOCK_RANK
    h = torch.empty((num_modules, num_pairs, capacity), dtype=torch.float32, device=x.device)
    block_k = 128 if x.dtype.itemsize == 2 else 64
    _shrink_experts[(num_tiles, num_modules)](
        x, h, rows.a, rows.ranks, slots, pairs.order, pairs.tiles, x.stride(0), num_pairs, NUM_EXPERTS=num_experts,
        NUM_MODULES=num_modules, TOP_K=pairs.top_k, X_DIVISOR=x_divisor, CAPACITY=capacity, DEPTH=rows.depth,
        BLOCK_ROWS=pairs.block_rows, BLOCK_RANK=_BLOCK_RANK, BLOCK_K=block_k, ALIGNMENT=ALIGNMENT,
        PRECISION=_precision(x), num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    column_tiles = ceil_div(rows.width, _LORA_COLUMNS)
    _expand_experts[(num_tiles, num_modules * column_tiles)](
        h, out, rows.b, rows.ranks, slots, pairs.order, pairs.tiles, out.stride(0), num_pairs, NUM_EXPERTS=num_experts,
        NUM_MODULES=num_modules, COLUMN_TILES=column_tiles, TOP_K=pairs.top_k, CAPACITY=capacity, WIDTH=rows.width,
        BLOCK_ROWS=pairs.block_rows, BLOCK_RANK=_BLOCK_RANK, BLOCK_COLUMNS=_LORA_COLUMNS, ALIGNMENT=ALIGNMENT,
        PRECISION=_precision(x), num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


def _precision(x: torch.Tensor) -> str:
    """The input precision of tl.dot, which has no effect for half types."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _expert_product(
    x, weight, out, bias, order, tiles, x_row, out_row, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    X_DIVISOR: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (G, tiles of columns)."""
    g = tl.program_id(0)
    count = tl.load(tiles + 3 * g + 1)
    if count == 0:
        return
    expert = tl.load(tiles + 3 * g + 2).to(tl.int64)
    token = tl.arange(0, BLOCK_ROWS)
    mine = token < count
    pair = tl.load(order + tl.load(tiles + 3 * g) + token, mask=mine, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_columns = column < WIDTH
    k = tl.arange(0, BLOCK_K)
    x_start = x + (pair // X_DIVISOR) * x_row
    weight_start = weight + expert * WIDTH * DEPTH + column.to(tl.int64) * DEPTH
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for k0 in range(0, DEPTH, BLOCK_K):
        inside = k0 + k < DEPTH
        x_tile = tl.load(x_start[:, None] + (k0 + k)[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
        weight_at = weight_start[None, :] + (k0 + k)[:, None]
        weight_tile = tl.load(weight_at, mask=in_columns[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(x_tile, weight_tile, sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + expert * WIDTH + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at = out + pair[:, None] * out_row + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=mine[:, None] & in_columns[None, :])


@triton.jit
def _next_adapter(adapter, after):
    """The smallest slot of the tile's rows above `after`, or one that no row has."""
    return tl.min(tl.where(adapter > after, adapter, 2147483647), axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def _shrink_experts(
    x, h, a, ranks, slots, order, tiles, x_row, num_pairs, NUM_EXPERTS: tl.constexpr, NUM_MODULES: tl.constexpr,
    TOP_K: tl.constexpr, X_DIVISOR: tl.constexpr, CAPACITY: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """h[n, pair, :rank] = A_n x[row], adapter by adapter. Grid: (G, N)."""
    g = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    count = tl.load(tiles + 3 * g + 1)
    if count == 0:
        return
    expert = tl.load(tiles + 3 * g + 2).to(tl.int64)
    token = tl.arange(0, BLOCK_ROWS)
    mine = token < count
    pair = tl.load(order + tl.load(tiles + 3 * g) + token, mask=mine, other=0).to(tl.int64)
    adapter = tl.load(slots + pair // TOP_K, mask=mine, other=0)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_RANK)
    x_start = x + (pair // X_DIVISOR) * x_row
    current = _next_adapter(adapter, 0)
    while current < 2147483647:
        at = (current.to(tl.int64) * NUM_EXPERTS + expert) * NUM_MODULES + n
        rank = tl.load(ranks + at)
        matrix = tl.multiple_of(tl.load(a + at), ALIGNMENT).to(tl.pointer_type(x.dtype.element_ty))
        own = adapter == current
        for r0 in range(0, rank, BLOCK_RANK):
            live = r0 + r < rank
            a_start = matrix + (r0 + r) * DEPTH
            sums = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
            for k0 in range(0, DEPTH, BLOCK_K):
                inside = k0 + k < DEPTH
                x_tile = tl.load(x_start[:, None] + (k0 + k)[None, :], mask=own[:, None] & inside[None, :], other=0.0)
                a_tile = tl.load(a_start[None, :] + (k0 + k)[:, None], mask=live[None, :] & inside[:, None], other=0.0)
                sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
            to = h + (n * num_pairs + pair)[:, None] * CAPACITY + (r0 + r)[None, :]
            tl.store(to, sums, mask=own[:, None] & live[None, :])
        current = _next_adapter(adapter, current)


@triton.jit(do_not_specialize=["num_pairs"])
def _expand_experts(
    h, out, b, ranks, slots, order, tiles, out_row, num_pairs, NUM_EXPERTS: tl.constexpr, NUM_MODULES: tl.constexpr,
    COLUMN_TILES: tl.constexpr, TOP_K: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[pair, columns of n] += B_n h[n, pair], adapter by adapter. Grid: (G, tiles of all modules' columns)."""
    g = tl.program_id(0)
    n = (tl.program_id(1) // COLUMN_TILES).to(tl.int64)
    column = tl.program_id(1) % COLUMN_TILES * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    count = tl.load(tiles + 3 * g + 1)
    if count == 0:
        return
    expert = tl.load(tiles + 3 * g + 2).to(tl.int64)
    token = tl.arange(0, BLOCK_ROWS)
    mine = token < count
    pair = tl.load(order + tl.load(tiles + 3 * g) + token, mask=mine, other=0).to(tl.int64)
    adapter = tl.load(slots + pair // TOP_K, mask=mine, other=0)
    inside = column < WIDTH
    r = tl.arange(0, BLOCK_RANK)
    current = _next_adapter(adapter, 0)
    while current < 2147483647:
        at = (current.to(tl.int64) * NUM_EXPERTS + expert) * NUM_MODULES + n
        rank = tl.load(ranks + at)
        if rank > 0:
            matrix = tl.multiple_of(tl.load(b + at), ALIGNMENT).to(tl.pointer_type(out.dtype.element_ty))
            own = adapter == current
            delta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            for r0 in range(0, rank, BLOCK_RANK):
                live = r0 + r < rank
                h_at = h + (n * num_pairs + pair)[:, None] * CAPACITY + (r0 + r)[None, :]
                shrunk = tl.load(h_at, mask=own[:, None] & live[None, :], other=0.0)
                b_at = matrix + (r0 + r)[:, None] * WIDTH + column[None, :]
                b_tile = tl.load(b_at, mask=live[:, None] & inside[None, :], other=0.0)
                delta = tl.dot(shrunk.to(b_tile.dtype), b_tile, delta, input_precision=PRECISION)
            at_out = out + pair[:, None] * out_row + (n * WIDTH + column)[None, :]
            written = own[:, None] & inside[None, :]
            total = tl.load(at_out, mask=written, other=0.0).to(tl.float32) + delta
            tl.store(at_out, total.to(out.dtype.element_ty), mask=written)
        current = _next_adapter(adapter, current)
