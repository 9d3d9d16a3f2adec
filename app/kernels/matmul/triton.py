"""The base product y = x W^T on the GPU in batch-invariant mode: the same tiles and sums for any number of rows.

A library picks kernels by shape, so that a row's bits depend on the batch; here the tile depends on the weight alone.
One row costs as much as 64, which is little while reading the weight takes the time; long prefills are slower than the
library's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.tuning import ceil_div

#: Neighbouring programs share the rows of this many row tiles, so that a weight tile is read from memory once.
_GROUP = 16


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    accumulate: bool = False,
) -> None:
    """out = x W^T + bias, or out += with `accumulate`; float32 sums, one rounding.

    x: [T, d_in]. weight: [d_out, d_in]. out: [T, d_out], of x's type or float32. bias: [d_out].
    """
    (num_rows, depth), width = x.shape, weight.shape[0]
    if weight.shape[1] != depth or out.shape != (num_rows, width) or x.dtype != weight.dtype:
        raise ValueError(
            f"product operands do not fit: x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}, "
            f"out {tuple(out.shape)}"
        )
    if num_rows == 0:
        return
    is_half = x.dtype.itemsize == 2
    block_rows, block_columns, block_k = (64, 128 if width >= 16384 else 64, 64) if is_half else (16, 64, 32)
    row_tiles, column_tiles = ceil_div(num_rows, block_rows), ceil_div(width, block_columns)
    _linear[(row_tiles * column_tiles,)](
        x, weight, out, weight if bias is None else bias, num_rows, row_tiles, x.stride(0), weight.stride(0),
        out.stride(0), WIDTH=width, DEPTH=depth, HAS_BIAS=bias is not None, ACCUMULATE=accumulate,
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, BLOCK_K=block_k, GROUP=_GROUP,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "row_tiles"])  # or a new number of rows could trigger a compilation
def _linear(
    x, weight, out, bias, num_rows, row_tiles, x_row, weight_row, out_row, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of out,), GROUP row tiles of one column tile after another."""
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    program = tl.program_id(0)
    group = program // (GROUP * COLUMN_TILES)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    local = program - group * (GROUP * COLUMN_TILES)
    row_tile = group * GROUP + local % group_rows
    row = row_tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (local // group_rows).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    k = tl.arange(0, BLOCK_K)
    in_rows, in_columns = row < num_rows, column < WIDTH
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for k0 in range(0, DEPTH, BLOCK_K):
        inside = k0 + k < DEPTH
        x_at = x + row[:, None] * x_row + (k0 + k)[None, :]
        x_tile = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0.0)
        weight_at = weight + column[None, :] * weight_row + (k0 + k)[:, None]
        weight_tile = tl.load(weight_at, mask=in_columns[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(x_tile, weight_tile, sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * out_row + column[None, :]
    written = in_rows[:, None] & in_columns[None, :]
    if ACCUMULATE:
        sums += tl.load(at, mask=written, other=0.0).to(tl.float32)
    tl.store(at, sums.to(out.dtype.element_ty), mask=written)
