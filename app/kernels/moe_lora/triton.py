"""LoRA deltas of experts on the GPU: every chosen expert of every token adds its own adapter rows.

In: rows, the products the experts' base weights gave, each token's adapter and chosen experts. Out: the products with
the deltas added, in place, before activation (gate/up) or routing weights (down). An (adapter, expert) is to the
kernels what an adapter is to a dense module: a run of rank rows, rank 0 where the adapter leaves the expert
alone, so tables hold what adapters bring and nothing else. There is no loop over experts and no copy to the
host: few pairs are computed one by one, many are sorted into groups on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from app.kernels.bgmv import triton as bgmv
from app.kernels.rank_rows import RankRows
from app.kernels.sgmv import triton as sgmv

#: From how many pairs on groups are worth sorting for: below, few pairs share both expert and adapter.
_MIN_GROUPED_PAIRS = 1024


class Groups(NamedTuple):
    """Pairs sorted by (adapter, expert): order [P] int32, segments [G, 3] int32 of places in it, unused ones empty."""

    order: torch.Tensor
    segments: torch.Tensor
    block_tokens: int


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    rows: RankRows,
    slots: torch.Tensor,
    experts: torch.Tensor,
    *,
    max_rank: int,
    per_pair: bool,
    deterministic: bool = False,
    grouped: bool | None = None,
) -> None:
    """y[p] += B A x of pair p = t * K + k: the rows of (adapter slots[t], expert experts[t, k]), in place.

    x: [T, d_in], or [T * K, d_in] with per_pair (down). y: [T * K, W]. rows: row_starts [S, E], ranks [S, E, N].
    slots: [T], experts: [T, K], integers. grouped: None chooses by size. ValueError for operands that do not fit.
    """
    num_tokens, num_choices = experts.shape
    num_slots, num_experts = rows.row_starts.shape
    if slots.shape != (num_tokens,) or rows.ranks.shape[:2] != (num_slots, num_experts):
        raise ValueError(
            f"LoRA operands do not fit: {tuple(slots.shape)} slots for {num_tokens} tokens, row_starts "
            f"{tuple(rows.row_starts.shape)}, ranks {tuple(rows.ranks.shape)}; expected [T], [S, E], [S, E, N]"
        )
    pairs = (slots[:, None].long() * num_experts + experts).flatten()  # [P], index into S * E
    rows = rows._replace(row_starts=rows.row_starts.flatten(), ranks=rows.ranks.flatten(0, 1))
    x_divisor = 1 if per_pair else num_choices
    num_pairs = pairs.shape[0]
    if grouped is None:
        grouped = deterministic or num_pairs >= _MIN_GROUPED_PAIRS
    if not grouped:
        bgmv.add_lora(x, y, rows, pairs, max_rank=max_rank, x_divisor=x_divisor)
        return
    found = groups(pairs, rows.ranks, deterministic=deterministic)
    sgmv.add_lora(
        x, y, rows, found.segments, max_rank=max_rank, block_tokens=found.block_tokens, order=found.order,
        x_divisor=x_divisor, deterministic=deterministic,
    )  # fmt: skip


def groups(pairs: torch.Tensor, ranks: torch.Tensor, *, deterministic: bool = False) -> Groups:
    """Sort pairs into segments on the device, with shapes that do not depend on their values.

    pairs: [P] int64, index of (adapter, expert). ranks: [S * E, N]. Pairs without rank rows are in no segment.
    """
    num_pairs, num_keys = pairs.shape[0], ranks.shape[0]
    cut = sgmv.block_tokens(num_pairs, deterministic=deterministic)
    num_segments = sgmv.max_segments(num_pairs, num_keys, cut)
    keys = torch.where((ranks != 0).any(dim=1)[pairs], pairs, num_keys)
    keys, order = torch.sort(keys, stable=True)
    place = torch.arange(num_pairs, device=pairs.device)
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    group_start = torch.where(is_first, place, 0).cummax(dim=0).values
    live = keys < num_keys
    starts_segment = live & ((place - group_start) % cut == 0)
    segment = torch.cumsum(starts_segment, dim=0) - 1
    # The row behind the last one takes what belongs to no segment.
    segments = torch.zeros((num_segments + 1, 3), dtype=torch.int32, device=pairs.device)
    at_start = torch.where(starts_segment, segment, num_segments)
    segments[:, 0].index_copy_(0, at_start, place.int())
    segments[:, 1].index_add_(0, torch.where(live, segment, num_segments), torch.ones_like(place, dtype=torch.int32))
    segments[:, 2].index_copy_(0, at_start, keys.int())
    return Groups(order.int(), segments[:num_segments], cut)
