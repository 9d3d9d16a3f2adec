"""Routing in plain torch.

In and out: the tensors that the forms of `triton.py` take. Sums and exponentials have one fixed order
(`fixed_order`). Tiles are whole experts, and none is unused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.moe_routing.pairs import SortedPairs
from tests.kernels.torch_forms.fixed_order import exponential, folded_sum


def route(
    logits: Tensor,
    experts: Tensor,
    topk_weights: Tensor,
    *,
    normalised: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> None:
    """experts [T, K] int32 and topk_weights [T, K] float32 from logits [T, E], in place; see `reference`.

    Shares that are no numbers choose experts all the same, the lowest first.
    """
    values = logits.float()
    powers = exponential(values - values.amax(-1, keepdim=True)).float()
    p = powers / folded_sum(powers.T.clone())[:, None]
    if top_groups < num_groups:
        best = p.view(len(p), num_groups, p.shape[1] // num_groups).amax(-1)  # [T, groups]
        kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :top_groups]
        in_kept = (kept[:, :, None] == torch.arange(num_groups)).any(1)  # [T, groups]
        p = torch.where(in_kept.repeat_interleave(p.shape[1] // num_groups, 1), p, 0.0)
    chosen = torch.sort(p.nan_to_num(-1.0), dim=-1, descending=True, stable=True).indices[:, : experts.shape[1]]
    found = p.gather(1, chosen)
    if normalised:
        total = found[:, 0].clone()
        for k in range(1, found.shape[1]):
            total += found[:, k]
        found = found / total[:, None]
    experts.copy_(chosen)
    topk_weights.copy_(found * scale)


def block_rows(dtype: torch.dtype) -> int:  # noqa: ARG001  (the Triton form's signature)
    """Tiles are not cut."""
    return 1 << 30


def sort_pairs(experts: Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """experts: [T, K] int32."""
    of_pair = experts.flatten()
    order = torch.sort(of_pair, stable=True).indices.int()
    counts = torch.bincount(of_pair, minlength=num_experts).tolist()
    tiles, at = [], 0
    for expert, count in enumerate(counts):
        if count:
            tiles.append((at, count, expert))
        at += count
    return SortedPairs(order, torch.tensor(tiles, dtype=torch.int32).view(-1, 3), experts.shape[1], block_rows)


def combine(
    outputs: Tensor, topk_weights: Tensor, hidden: Tensor, shared: Tensor | None = None, gates: Tensor | None = None
) -> None:
    """hidden[t] += Σ_k topk_weights[t, k] * outputs[t * K + k] + logistic(gates[t]) * shared[t], in place.

    outputs: [T * K, H]; topk_weights: [T, K] float32; hidden, shared: [T, H]; gates: [T, 1], None: a factor of one.
    """
    of_token = outputs.float().view(*topk_weights.shape, outputs.shape[1])  # [T, K, H]
    total = of_token[:, 0] * topk_weights[:, :1]
    for k in range(1, topk_weights.shape[1]):
        total = total + of_token[:, k] * topk_weights[:, k : k + 1]
    if shared is not None:
        part = shared.float()
        total = total + (part if gates is None else (part.double() / (1 + exponential(-gates.float()))).float())
    hidden.copy_(hidden.float() + total)
