"""Deltas where every row has its own adapter, in plain torch: each row gathers its adapter's rank rows."""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.rank_rows import RankRows


def add_lora(x: Tensor, y: Tensor, rows: RankRows, slots: Tensor, *, max_rank: int) -> None:
    """y[t] += B A x[t], in place. x: [T, d_in], y: [T, W], slots: [T] int32, 0 for the base."""
    lane = torch.arange(max_rank, device=x.device)
    slots = slots.long()
    last = rows.b.shape[0] - 1
    places = (rows.row_starts[slots].long()[:, None] + lane).clamp(max=last)  # [T, r]
    column = 0
    for n, width in enumerate(rows.widths):
        own = (lane < rows.ranks[slots, n].long()[:, None])[..., None]  # [T, r, 1]
        a = torch.where(own, rows.a[n][places].float(), 0.0)  # [T, r, d_in]
        b = torch.where(own, rows.b[:, column : column + width][places].float(), 0.0)
        delta = torch.bmm(torch.bmm(x[:, None].float(), a.transpose(1, 2)), b)[:, 0]
        target = y[:, column : column + width]
        target.copy_(torch.where(own.any(1), target + delta, target.float()))
        column += width
