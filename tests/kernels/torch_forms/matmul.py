"""Base products in plain torch, in one fixed order.

In: rows and a weight. Out: their product. A row's bits depend on its own values only, on every machine
(`fixed_order`). It is there to be right, not fast.
"""

from __future__ import annotations

from torch import Tensor

from tests.kernels.torch_forms.fixed_order import product


def linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, accumulate: bool = False) -> None:
    """out (+)= x @ weight.T + bias in place; float32 sums, one rounding.

    x: [T, d_in], weight: [d_out, d_in], out: [T, d_out], bias: [d_out].
    """
    sums = product(x.float(), weight.float())
    if bias is not None:
        sums += bias
    out.copy_(out + sums if accumulate else sums)
