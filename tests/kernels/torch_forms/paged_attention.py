"""Attention over block tables in plain torch, one sequence at a time.

In: queries, KV memory and block tables. Out: the attended values, in place. In deterministic mode a query's bits depend
on the keys it sees alone, on every machine: sums over a head and over keys have one fixed order that counts keys from
the sequence's beginning (`fixed_order`), so neither the chunk a query comes in nor keys behind it
change a bit. Otherwise products and softmax are torch's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.torch_forms.fixed_order import MOST_TERMS, exponential, folded_sum


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    *,
    scale: float,
    max_query_len: int,  # noqa: ARG001  (the Triton form's signature)
    max_seq_len: int,  # noqa: ARG001
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """As `reference.paged_attention`, into out [T, heads, D].

    q: [T, heads, D]; caches: [blocks, kv_heads, block_size, D], of which values, and out, may have another D; sinks:
    [heads] float32.
    """
    of_group = None if sinks is None else sinks.view(k_cache.shape[1], -1)  # [kv_heads, group]
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    block_size, kv_heads, dim = k_cache.shape[2], k_cache.shape[1], k_cache.shape[3]
    for b, seq_len in enumerate(lengths):
        first, end = starts[b], starts[b + 1]
        if first == end:
            continue
        table = block_tables[b, : -(-seq_len // block_size)].long()
        keys, values = (
            cache[table].transpose(1, 2).reshape(-1, kv_heads, cache.shape[3])[:seq_len].float()
            for cache in (k_cache, v_cache)
        )  # [seq_len, kv_heads, D]
        step = max(1, MOST_TERMS // (q.shape[1] * seq_len * dim)) if batch_invariant else end - first
        for at in range(first, end, step):
            until = min(at + step, end)
            last = torch.arange(seq_len - end + at + 1, seq_len - end + until + 1, device=q.device)[:, None]
            places = torch.arange(seq_len, device=q.device)
            visible = places < last  # [Q, seq_len]
            if window is not None:
                visible &= places >= last - window
            queries = q[at:until].float().reshape(until - at, kv_heads, -1, dim) * scale  # [Q, kv_heads, group, D]
            attend = _attend_in_order if batch_invariant else _attend
            out[at:until] = attend(queries, keys, values, visible, softcap, of_group).flatten(1, 2).to(out.dtype)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[Q, kv_heads, group, D] of scaled queries of that shape; keys, values: [n, kv_heads, D]; visible: [Q, n].

    sinks: [kv_heads, group].
    """
    # A key that no query sees may be anything, and 0 * NaN is not 0.
    values = torch.where(visible.any(0)[:, None, None], values, 0.0)
    scores = torch.einsum("qkgd,nkd->kgqn", queries, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("kgqn,nkd->qkgd", weights, values)


def _attend_in_order(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """As `_attend`, every sum in one order."""
    seen = visible.T[:, :, None, None]  # [n, Q, 1, 1]
    by_dim = keys.permute(2, 0, 1)[:, :, None, :, None]  # [D, n, 1, kv_heads, 1]
    scores = folded_sum(queries.permute(3, 0, 1, 2)[:, None] * by_dim)  # [n, Q, kv_heads, group]
    if softcap is not None:
        scores = (softcap * (1 - 2 / (1 + exponential(2 * scores / softcap)))).float()  # softcap * tanh(...)
    scores = torch.where(seen, scores, float("-inf"))
    top = scores.amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = exponential(scores - top).float()
    terms = torch.where(seen[..., None], weights[..., None] * values[:, None, :, None], 0.0)
    total = folded_sum(weights)
    if sinks is not None:
        total = total + exponential(sinks - top).float()
    return folded_sum(terms) / total[..., None]
