"""Where adapters' rows of experts lie in a device's memory: one product of one layer, as the device kernels read it.

In: device tensors that the backend owns. Out: a tuple that travels to the kernels unchanged. An adapter's matrices lie
in memory of its own, each at its own rank; what is here are addresses. Their tables stay where they are for the life of
a CUDA graph, and their contents do not: writing an adapter changes what a captured step reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from app.kernels.moe_routing.pairs import SortedPairs

#: Matrices begin at multiples of so many bytes: what one load of a GPU takes.
ALIGNMENT = 16


class ExpertRows(NamedTuple):
    """S adapter slots, E experts, N modules that share their input and have outputs of one width (gate and up; down).

    a, b: [S, E, N] int64, addresses of matrices [rank, depth] and [rank, width], in the type of what is multiplied,
    b with the scale. ranks: [S, E, N] int32, 0 where an adapter leaves a module of an expert alone.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    depth: int
    width: int


def check_operands(
    x: torch.Tensor, out: torch.Tensor, pairs: SortedPairs, depth: int, width: int, x_divisor: int
) -> None:
    """Raises ValueError, naming both sides, for operands that the kernels would read or write out of bounds."""
    num_pairs = len(pairs.order)
    if x.shape != (num_pairs // x_divisor, depth) or out.shape != (num_pairs, width) or x.dtype != out.dtype:
        raise ValueError(
            f"operands of experts do not fit: x {tuple(x.shape)} {x.dtype}, out {tuple(out.shape)} {out.dtype}; "
            f"expected {(num_pairs // x_divisor, depth)} and {(num_pairs, width)} of one type for {num_pairs} pairs"
        )
    if any(t.numel() and t.stride(-1) != 1 for t in (x, out)):
        raise ValueError("the last dimension of x and out must be contiguous")
