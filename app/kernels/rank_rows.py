"""The rank-row tables of one fused module, as the GPU kernels read them.

In: device tensors that the backend owns. Out: a tuple that travels to the kernels unchanged. An adapter of rank r
owns rows `row_starts[s]` to `row_starts[s] + r` of both tables; rows beyond an adapter's own rank are never read.
Slot 0 is the base: rank 0. Addresses and shapes are fixed for the life of a CUDA graph, contents are not: writing
an adapter's rows, its start and its ranks is all that loading it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Slices of one fused module: q/k/v.
MAX_SLICES = 3


class RankRows(NamedTuple):
    """N slices that share their input (q/k/v: 3, gate/up: 2, else 1), R rank rows, S adapter slots, W = sum(widths).

    a: [N, R, d_in]. b: [R, W], the slices side by side, scale folded in. widths: of the N slices. row_starts: [S]
    int32. ranks: [S, N] int32, 0 where an adapter leaves a slice alone.
    """

    a: torch.Tensor
    b: torch.Tensor
    widths: tuple[int, ...]
    row_starts: torch.Tensor
    ranks: torch.Tensor

    @property
    def depth(self) -> int:
        """d_in."""
        return self.a.shape[2]


def check_operands(x: torch.Tensor, y: torch.Tensor, rows: RankRows, num_rows: int) -> None:
    """Raises ValueError, naming both sides, for operands the kernels would read or write out of bounds."""
    num_slices, num_rank_rows, depth = rows.a.shape
    width = sum(rows.widths)
    wrong = None
    if not 1 <= num_slices <= MAX_SLICES or len(rows.widths) != num_slices:
        wrong = f"{num_slices} slices of a, {len(rows.widths)} widths; 1 to {MAX_SLICES}, and one width per slice"
    elif rows.b.shape != (num_rank_rows, width):
        wrong = f"b is {tuple(rows.b.shape)}, expected {(num_rank_rows, width)} from a and the widths"
    elif rows.ranks.shape[-1] != num_slices or not rows.ranks.is_contiguous():
        wrong = f"ranks are {tuple(rows.ranks.shape)}, expected contiguous [S, {num_slices}]"
    elif x.shape[1] != depth or x.shape[0] < num_rows:
        wrong = f"x is {tuple(x.shape)}, expected at least {num_rows} rows of {depth}"
    elif y.shape[0] < num_rows or y.shape[1] != width:
        wrong = f"y is {tuple(y.shape)}, expected at least {num_rows} rows of {width}"
    elif len({t.dtype for t in (x, y, rows.a, rows.b)}) != 1:
        wrong = f"x, y, a and b are {x.dtype}, {y.dtype}, {rows.a.dtype}, {rows.b.dtype}; they share one type"
    elif any(t.numel() and t.stride(-1) != 1 for t in (x, y, rows.a, rows.b)):
        wrong = "the last dimension of x, y, a and b must be contiguous"
    if wrong is not None:
        raise ValueError(f"LoRA operands do not fit: {wrong}")
