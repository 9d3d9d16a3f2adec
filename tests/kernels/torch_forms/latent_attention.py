"""Latent attention in plain torch, over latents as they are.

The signatures are those of `triton.py`. Arithmetic is float32 whatever the tensors hold; in deterministic mode sums
have one fixed order (`paged_attention`; the first numbers of a key are its value).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.torch_forms.paged_attention import paged_attention


def rotate_and_store(
    queries: Tensor,
    latents: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory: Tensor,
    kv_slots: Tensor,
    *,
    num_heads: int,
) -> None:
    """Rotate the last E numbers of queries [T, N * (P + E)] by head and of latents [T, R + E], in place; store latents.

    Neighbours are turned together; cos, sin: [positions, E / 2] float32. memory: [blocks, 1, block_size, R + E];
    kv_slots: [T] int64, a slot beyond the memory is not written.
    """
    where, size = positions.long(), 2 * cos.shape[1]
    c, s = cos[where], sin[where]
    for part, angles in (
        (queries.view(len(queries), num_heads, -1)[..., -size:], (c[:, None], s[:, None])),
        (latents[:, -size:], (c, s)),
    ):
        part.copy_(_turned(part.float(), *angles))
    block_size = memory.shape[2]
    real = kv_slots < memory.shape[0] * block_size
    memory[kv_slots[real] // block_size, 0, kv_slots[real] % block_size] = latents[real]


def latent_attention(
    absorbed: Tensor,
    rotated: Tensor,
    memory: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    batch_invariant: bool = False,
) -> None:
    """out [T, N, R]: every head's sum of latents over the keys that a query sees, weighed by its softmax.

    absorbed: [T, N, R]; rotated: [T, N, E]; memory: [blocks, 1, block_size, R + E].
    """
    paged_attention(
        torch.cat([absorbed, rotated], -1), memory, memory[..., : absorbed.shape[2]], query_starts, seq_lens,
        block_tables, out, scale=scale, max_query_len=max_query_len, max_seq_len=max_seq_len,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., E], neighbours turned by cos and sin [..., E / 2]."""
    first, second = x[..., ::2], x[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([part[..., None] for part in turned], -1).flatten(-2)
