"""Deltas of runs of tokens, one run of one adapter at a time, in plain torch.

The signatures are those of `triton.py`, so that either form can stand behind a decoder; what differs is that this
one reads run bounds on the host. In deterministic mode sums have one fixed order (`fixed_order`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.kernels.lora_rows import RankRows
from tests.kernels.torch_forms.fixed_order import product


def block_tokens(num_tokens: int, *, batch_invariant: bool) -> int:  # noqa: ARG001  (the Triton form's signature)
    """Runs are not cut."""
    return max(num_tokens, 1)


def max_segments(num_tokens: int, num_runs: int, block_tokens: int) -> int:
    """Rows to allocate for segments."""
    return min(num_tokens, num_runs + num_tokens // block_tokens)


def segments(
    run_starts: NDArray[np.int32], run_adapter_slots: NDArray[np.int32], block_tokens: int
) -> NDArray[np.int32]:
    """[G, 3]: first row, number of rows, adapter slot of pieces of at most `block_tokens` rows; none of the base."""
    found = [
        (at, min(block_tokens, end - at), slot)
        for first, end, slot in zip(
            run_starts[:-1].tolist(), run_starts[1:].tolist(), run_adapter_slots.tolist(), strict=True
        )
        if slot
        for at in range(first, end, block_tokens)
    ]
    return np.array(found, np.int32).reshape(-1, 3)


def add_lora(
    x: Tensor,
    y: Tensor,
    rows: RankRows,
    segments: Tensor,
    *,
    max_rank: int,
    block_tokens: int,  # noqa: ARG001
    batch_invariant: bool = False,
) -> None:
    """y[t] += B A x[t] for the rows of each segment, in place. x: [T, d_in], y: [T, W], segments: [G, 3] int32."""
    for first, count, slot in segments.tolist():
        if not count:
            continue
        part, out = x[first : first + count], y[first : first + count]
        column = 0
        for n, width in enumerate(rows.widths):
            rank = int(rows.ranks[slot, n])
            assert rank <= max_rank, "the step was told a bound of its ranks"
            if rank:
                a = rows.memory[int(rows.a_starts[slot, n]) :][: rank * rows.depth].view(rank, -1)
                b = rows.memory[int(rows.b_starts[slot, n]) :][: rank * width].view(rank, -1)
                target = out[:, column : column + width]
                if batch_invariant:
                    shrunk = product(part.float(), a.float())
                    target.copy_(target + product(shrunk, b.float().T))
                else:
                    target.copy_(target + (part.float() @ a.float().T) @ b.float())
            column += width
