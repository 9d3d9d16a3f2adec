"""Attention over block tables in plain torch, one sequence at a time.

In deterministic mode one query at a time: then what is computed for a query has the same shapes in every chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    deterministic: bool = False,
) -> None:
    """As `reference.paged_attention`, into out [T, heads, D].

    q: [T, heads, D]; caches: [blocks, kv_heads, block_size, D].
    """
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    block_size, kv_heads = k_cache.shape[2], k_cache.shape[1]
    for b, seq_len in enumerate(lengths):
        first, end = starts[b], starts[b + 1]
        if first == end:
            continue
        table = block_tables[b, : -(-seq_len // block_size)].long()
        keys, values = (
            cache[table].transpose(1, 2).reshape(-1, kv_heads, cache.shape[3])[:seq_len].transpose(0, 1).float()
            for cache in (k_cache, v_cache)
        )  # [kv_heads, seq_len, D]
        step = 1 if deterministic else end - first
        for at in range(first, end, step):
            last = seq_len - end + at + 1  # keys that the first query of this piece sees
            low = 0 if window is None else max(0, last - window)
            high = last + step - 1
            visible = torch.arange(last, high + 1, device=q.device)[:, None]  # [Q, 1]
            places = torch.arange(low, high, device=q.device)
            mask = places < visible
            if window is not None:
                mask &= places >= visible - window
            queries = q[at : at + step].float().reshape(step, kv_heads, -1, q.shape[2])
            scores = torch.einsum("qkgd,knd->kgqn", queries, keys[:, low:high]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            mixed = torch.einsum("kgqn,knd->qkgd", weights, values[:, low:high])
            out[at : at + step] = mixed.reshape(step, -1, q.shape[2]).to(out.dtype)
