"""Deltas where every row has its own adapter, in plain torch: each row gathers its adapter's rank rows."""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.lora_rows import RankRows


def add_lora(x: Tensor, y: Tensor, rows: RankRows, slots: Tensor, *, max_rank: int) -> None:
    """y[t] += B A x[t], in place. x: [T, d_in], y: [T, W], slots: [T] int32, 0 for the base."""
    lane = torch.arange(max_rank, device=x.device)
    slots = slots.long()
    column = 0
    for n, width in enumerate(rows.widths):
        own = (lane < rows.ranks[slots, n].long()[:, None])[..., None]  # [T, r, 1]
        a = _gathered(rows.memory, rows.a_starts[slots, n], lane, rows.depth, own)  # [T, r, d_in]
        b = _gathered(rows.memory, rows.b_starts[slots, n], lane, width, own)
        delta = torch.bmm(torch.bmm(x[:, None].float(), a.transpose(1, 2)), b)[:, 0]
        target = y[:, column : column + width]
        target.copy_(torch.where(own.any(1), target + delta, target.float()))
        column += width


def _gathered(memory: Tensor, starts: Tensor, lane: Tensor, width: int, own: Tensor) -> Tensor:
    """[T, r, width]: the matrices that begin at starts [T], zero in rows that are not their own."""
    first = torch.where(own, (starts[:, None] + lane * width)[..., None], 0)  # [T, r, 1]
    return torch.where(own, memory[first + torch.arange(width, device=memory.device)].float(), 0.0)
