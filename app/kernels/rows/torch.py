"""One-row operations in plain torch: RMS norm, rotary embedding with the KV write, gated activations.

Arithmetic is float32 whatever the tensors hold. The signatures are those of `triton.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
    """out = x / rms(x) * weight (Zhang & Sennrich 2019).

    With a residual: residual += x first, and its norm is taken.
    """
    if residual is not None:
        residual += x
        x = residual
    out.copy_(_normalised(x, weight, eps))


def gated(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """out [T, I] = act(gate) * up of gate_up [T, 2 I]; "silu", or "gelu_tanh" (Hendrycks & Gimpel 2016)."""
    gate, up = gate_up.float().chunk(2, 1)
    # On a CPU torch ends each thread's part of an array with scalar code, whose exponentials differ from the vectors'
    # in the last bit. In float64 both round to the same float32, wherever the parts end.
    wide = gate.double() if gate.device.type == "cpu" else gate
    # 0.5 (1 + tanh(z)) is the logistic function of 2 z, without the cancellation.
    z = wide if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    act = wide * torch.sigmoid(z)
    out.copy_(act.float() * up)


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

    cos, sin: [positions, D / 2] float32; caches: [blocks, kv_heads, block_size, D]; kv_slots: [T] int64, a slot
    beyond the caches is not written.
    """
    num_tokens, dim = len(qkv), k_cache.shape[3]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, dim)
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    where = positions.long()
    tables = cos[where][:, None], sin[where][:, None]
    rotated_q = _rotated(q.float() if q_norm is None else _normalised(q, q_norm, eps), *tables)
    rotated_k = _rotated(k.float() if k_norm is None else _normalised(k, k_norm, eps), *tables)
    q.copy_(rotated_q)
    block_size = k_cache.shape[2]
    real = kv_slots < k_cache.shape[0] * block_size
    blocks, offsets = kv_slots[real] // block_size, kv_slots[real] % block_size
    k_cache[blocks, :, offsets] = rotated_k[real].to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v[real].to(v_cache.dtype)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split layout (Su et al. 2021). x: [T, heads, D]; cos, sin: [T, 1, D / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
