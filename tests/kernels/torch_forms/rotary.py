"""Rotary embedding with the KV write in plain torch.

Arithmetic is float32 whatever the tensors hold. The signature is that of `triton.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.torch_forms.norms import normalised


def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Normalise (Qwen3) and rotate q in place in qkv [T, (heads + 2 kv_heads) D]; write k and v to the caches.

    cos, sin: [positions, half] float32, of which each head's first 2 * half elements rotate and the rest stays;
    caches: [blocks, kv_heads, block_size, D]; kv_slots: [T] int64, a slot beyond the caches is not written.
    """
    num_tokens, dim = len(qkv), k_cache.shape[3]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, dim)
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    where = positions.long()
    tables = cos[where][:, None], sin[where][:, None]
    rotated_q = _rotated(q.float() if q_norm is None else normalised(q, q_norm, eps), *tables)
    rotated_k = _rotated(k.float() if k_norm is None else normalised(k, k_norm, eps), *tables)
    q.copy_(rotated_q)
    block_size = k_cache.shape[2]
    real = kv_slots < k_cache.shape[0] * block_size
    blocks, offsets = kv_slots[real] // block_size, kv_slots[real] % block_size
    k_cache[blocks, :, offsets] = rotated_k[real].to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v[real].to(v_cache.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split layout (Su et al. 2021). x: [T, heads, D]; cos, sin: [T, 1, half]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
