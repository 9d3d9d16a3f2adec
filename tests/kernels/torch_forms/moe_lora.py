"""Experts' products and their LoRA deltas in plain torch, one expert at a time.

The signatures are those of `triton.py`; what differs is that this one reads tiles and addresses on the host, so it is
for a device that is the host. Sums have one fixed order (`fixed_order`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from app.kernels.lora_rows import ExpertRows, check_expert_operands
from app.kernels.moe_routing.pairs import SortedPairs
from tests.kernels.torch_forms.fixed_order import product as fixed_product


def expert_linear(
    x: Tensor, weight: Tensor, out: Tensor, pairs: SortedPairs, bias: Tensor | None = None, *, x_divisor: int = 1
) -> None:
    """out[p] = W_e x[p // x_divisor] + bias_e of every pair's expert e, in place; float32 sums, one rounding.

    x: [P / x_divisor, d_in]; weight: [E, W, d_in]; out: [P, W]; bias: [E, W].
    """
    check_expert_operands(x, out, pairs, weight.shape[2], weight.shape[1], x_divisor)
    for first, count, expert in pairs.tiles.tolist():
        of_expert = pairs.order[first : first + count].long()
        sums = fixed_product(x[of_expert // x_divisor].float(), weight[expert].float())
        if bias is not None:
            sums += bias[expert]
        out[of_expert] = sums.to(out.dtype)


def add_lora(
    x: Tensor,
    out: Tensor,
    rows: ExpertRows,
    slots: Tensor,
    pairs: SortedPairs,
    *,
    max_rank: int,
    x_divisor: int = 1,
) -> None:
    """out[p] += B A x[p // x_divisor], of adapter slots[p // K] and of pair p's expert, in place.

    slots: [T] int32, 0 for the base; the rest as for `expert_linear`.
    """
    num_modules = rows.ranks.shape[2]
    check_expert_operands(x, out, pairs, rows.depth, num_modules * rows.width, x_divisor)
    for first, count, expert in pairs.tiles.tolist():
        of_expert = pairs.order[first : first + count].long()
        of_pair = slots[of_expert // pairs.top_k]
        for adapter_slot in sorted(set(of_pair.tolist()) - {0}):
            own = of_expert[of_pair == adapter_slot]
            for n in range(num_modules):
                rank = int(rows.ranks[adapter_slot, expert, n])
                assert rank <= max_rank, "the step was told a bound of its ranks"
                if rank:
                    a = _matrix(int(rows.a[adapter_slot, expert, n]), rank, rows.depth, x.dtype)
                    b = _matrix(int(rows.b[adapter_slot, expert, n]), rank, rows.width, x.dtype)
                    columns = slice(n * rows.width, (n + 1) * rows.width)
                    shrunk = fixed_product(x[own // x_divisor].float(), a.float())
                    out[own, columns] = (out[own, columns] + fixed_product(shrunk, b.float().T)).to(out.dtype)


def _matrix(address: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (num_rows * width * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, width)
