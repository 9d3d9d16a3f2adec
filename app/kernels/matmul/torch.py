"""Base products of fixed tiles in plain torch: the form for devices without Triton.

In: rows and a weight. Out: their product, where a row's bits depend on its own values only: every product torch is
asked for has the same shape, `TILE` rows of the whole depth, whatever the batch. It is there to be right, not fast.
"""

from __future__ import annotations

from torch import Tensor, nn

TILE = 8


def linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, accumulate: bool = False) -> None:
    """out (+)= x @ weight.T + bias in place. x: [T, d_in], weight: [d_out, d_in], out: [T, d_out], bias: [d_out]."""
    for first in range(0, len(x), TILE):
        rows = x[first : first + TILE]
        count = len(rows)
        if count < TILE:
            rows = nn.functional.pad(rows, (0, 0, 0, TILE - count))
        product = nn.functional.linear(rows, weight)[:count]
        if bias is not None:
            product = product + bias
        part = out[first : first + count]
        part.copy_(part + product if accumulate else product)
