"""Device tables of adapters' LoRA rows, as the GPU kernels read them: `RankRows` of modules, `ExpertRows` of experts.

The backend owns the tensors. Slot 0 is the base: rank 0. Addresses and shapes are fixed for the life of a CUDA graph,
contents are not: loading an adapter writes its matrices, their starts and their ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from app.kernels.moe_routing.pairs import SortedPairs

#: Slices of one fused module: q/k/v.
MAX_SLICES = 3
#: Rank rows' matrices begin at multiples of so many numbers, so that kernels read several with one load.
START_MULTIPLE = 16
#: Experts' matrices begin at multiples of so many bytes: one load of a GPU.
ALIGNMENT = 16


class RankRows(NamedTuple):
    """N slices of one fused module that share their input (q/k/v: 3, gate/up: 2, else 1), S adapter slots.

    memory: [M] numbers of all adapters. a_starts, b_starts: [S, N] int64, where a slice's matrices [rank, depth] and
    [rank, its width] begin in it, multiples of `START_MULTIPLE`; b includes the scale. ranks: [S, N] int32, 0 where an
    adapter does not change a slice: then nothing is read. depth: d_in. widths: of the N slices, W together.
    """

    memory: torch.Tensor
    a_starts: torch.Tensor
    b_starts: torch.Tensor
    ranks: torch.Tensor
    depth: int
    widths: tuple[int, ...]


def check_operands(x: torch.Tensor, y: torch.Tensor, rows: RankRows, num_rows: int) -> None:
    """Raises ValueError, naming both sides, for operands that the kernels would access out of bounds."""
    num_slices, width = len(rows.widths), sum(rows.widths)
    tables = {"a_starts": rows.a_starts, "b_starts": rows.b_starts, "ranks": rows.ranks}
    wrong = None
    if not 1 <= num_slices <= MAX_SLICES:
        wrong = f"{num_slices} widths; 1 to {MAX_SLICES} slices are read"
    elif x.shape[1] != rows.depth or x.shape[0] < num_rows:
        wrong = f"x is {tuple(x.shape)}, expected at least {num_rows} rows of {rows.depth}"
    elif y.shape[0] < num_rows or y.shape[1] != width:
        wrong = f"y is {tuple(y.shape)}, expected at least {num_rows} rows of {width}"
    elif len({t.dtype for t in (x, y, rows.memory)}) != 1:
        wrong = f"x, y and memory are {x.dtype}, {y.dtype}, {rows.memory.dtype}; they share one type"
    elif any(t.numel() and t.stride(-1) != 1 for t in (x, y, rows.memory)):
        wrong = "the last dimension of x, y and memory must be contiguous"
    for name, table in tables.items():
        if table.shape != (len(rows.ranks), num_slices) or not table.is_contiguous():
            wrong = wrong or f"{name} is {tuple(table.shape)}, expected contiguous [S, {num_slices}]"
    if wrong is not None:
        raise ValueError(f"LoRA operands do not fit: {wrong}")


class ExpertRows(NamedTuple):
    """S adapter slots, E experts, N modules that share their input and have outputs of one width (gate and up; down).

    a, b: [S, E, N] int64, addresses of matrices [rank, depth] and [rank, width] in each adapter's own memory, in the
    operands' type; b includes the scale. ranks: [S, E, N] int32, 0 where an adapter does not change a module of an
    expert.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    depth: int
    width: int


def check_expert_operands(
    x: torch.Tensor, out: torch.Tensor, pairs: SortedPairs, depth: int, width: int, x_divisor: int
) -> None:
    """Raises ValueError, naming both sides, for operands that the kernels would access out of bounds."""
    num_pairs = len(pairs.order)
    if x.shape != (num_pairs // x_divisor, depth) or out.shape != (num_pairs, width) or x.dtype != out.dtype:
        raise ValueError(
            f"operands of experts do not fit: x {tuple(x.shape)} {x.dtype}, out {tuple(out.shape)} {out.dtype}; "
            f"expected {(num_pairs // x_divisor, depth)} and {(num_pairs, width)} of one type for {num_pairs} pairs"
        )
    if any(t.numel() and t.stride(-1) != 1 for t in (x, out)):
        raise ValueError("the last dimension of x and out must be contiguous")
