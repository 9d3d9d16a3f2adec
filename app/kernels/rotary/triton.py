"""Rotary embedding on the GPU, with the norms of heads before it and the write to the caches after it.

Every program works on one row, in float32, with one rounding at the end, so a row's bits depend on that row only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.tuning import ceil_div, next_power_of_two

#: Heads of one program.
_HEADS = 8


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_slots: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries in place (Su et al. 2021, half-split), rotate keys into the cache, copy values into it.

    qkv: [T, (heads + 2 kv_heads) * D]. positions: [T] integers. cos, sin: [positions, rotated / 2] float32. Caches:
    [blocks, kv_heads, block_size, D]. kv_slots: [T] int64, block * block_size + offset; what lies at or beyond the
    caches' end is padding and not written. q_norm, k_norm: [D], an RMS norm of every head before the rotation (Qwen
    3), or neither.
    """
    num_rows, head_dim, half = qkv.shape[0], k_cache.shape[3], cos.shape[1]
    num_blocks, _, block_size, _ = k_cache.shape
    wrong = None
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        wrong = f"qkv {tuple(qkv.shape)} for {num_heads} + 2 * {num_kv_heads} heads of {head_dim}"
    elif k_cache.shape != v_cache.shape or k_cache.shape[1] != num_kv_heads:
        wrong = f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} for {num_kv_heads} key heads"
    elif cos.shape != sin.shape or 2 * half > head_dim:
        wrong = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for heads of {head_dim}"
    elif positions.shape != (num_rows,) or kv_slots.shape != (num_rows,):
        wrong = f"{tuple(positions.shape)} positions, {tuple(kv_slots.shape)} kv_slots for {num_rows} rows"
    elif (q_norm is None) != (k_norm is None):
        wrong = "q_norm and k_norm come together"
    if wrong is not None:
        raise ValueError(f"rotation operands do not fit: {wrong}")
    if num_rows == 0:
        return
    _rotate_and_write[(num_rows, ceil_div(num_heads + 2 * num_kv_heads, _HEADS))](
        qkv, positions, cos, sin, k_cache, v_cache, kv_slots, cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm, eps, num_blocks * block_size, qkv.stride(0), cos.stride(0), sin.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0), v_cache.stride(1),
        v_cache.stride(2), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=head_dim, HALF=half,
        BLOCK_SIZE=block_size, HAS_NORM=q_norm is not None, BLOCK_HEADS=_HEADS, BLOCK_HALF=next_power_of_two(half),
        BLOCK_REST=next_power_of_two(max(head_dim - 2 * half, 1)), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _rotate_and_write(
    qkv, positions, cos, sin, k_cache, v_cache, kv_slots, q_norm, k_norm, eps, num_kv_slots, qkv_row, cos_row, sin_row,
    k_block, k_head, k_key, v_block, v_head, v_key, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Grid: (T, tiles of heads); the heads of a row are its queries, then keys, then values."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    # The three parts of a head: two halves that rotate into each other, and what lies behind them.
    i = tl.arange(0, BLOCK_HALF)
    j = 2 * HALF + tl.arange(0, BLOCK_REST)
    at = qkv + t * qkv_row + head[:, None] * DIM
    in_half = exists[:, None] & (i < HALF)[None, :]
    in_rest = exists[:, None] & (j < DIM)[None, :]
    first = tl.load(at + i[None, :], mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + i[None, :], mask=in_half, other=0.0).to(tl.float32)
    rest = tl.load(at + j[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / DIM + eps))[:, None]
        first = first * scale * _weights(q_norm, k_norm, i, i < HALF, is_query, is_key)
        second = second * scale * _weights(q_norm, k_norm, HALF + i, i < HALF, is_query, is_key)
        rest = rest * scale * _weights(q_norm, k_norm, j, j < DIM, is_query, is_key)
    position = tl.load(positions + t).to(tl.int64)
    c = tl.load(cos + position * cos_row + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * sin_row + i, mask=i < HALF, other=0.0)[None, :]
    rotates = (is_query | is_key)[:, None]
    rotated_first = tl.where(rotates, first * c - second * s, first).to(qkv.dtype.element_ty)
    rotated_second = tl.where(rotates, second * c + first * s, second).to(qkv.dtype.element_ty)
    rest = rest.to(qkv.dtype.element_ty)
    tl.store(at + i[None, :], rotated_first, mask=in_half & is_query[:, None])
    tl.store(at + HALF + i[None, :], rotated_second, mask=in_half & is_query[:, None])
    if HAS_NORM:
        tl.store(at + j[None, :], rest, mask=in_rest & is_query[:, None])

    kv_slot = tl.load(kv_slots + t)
    if kv_slot >= num_kv_slots:
        return
    block, offset = kv_slot // BLOCK_SIZE, kv_slot % BLOCK_SIZE
    k_at = k_cache + block * k_block + offset * k_key + (head - NUM_HEADS)[:, None] * k_head
    tl.store(k_at + i[None, :], rotated_first, mask=in_half & is_key[:, None])
    tl.store(k_at + HALF + i[None, :], rotated_second, mask=in_half & is_key[:, None])
    tl.store(k_at + j[None, :], rest, mask=in_rest & is_key[:, None])
    v_at = v_cache + block * v_block + offset * v_key + (head - NUM_HEADS - NUM_KV_HEADS)[:, None] * v_head
    tl.store(v_at + i[None, :], rotated_first, mask=in_half & is_value[:, None])
    tl.store(v_at + HALF + i[None, :], rotated_second, mask=in_half & is_value[:, None])
    tl.store(v_at + j[None, :], rest, mask=in_rest & is_value[:, None])


@triton.jit
def _weights(q_norm, k_norm, at, inside, is_query, is_key):
    """The norm's weights of every head at these places; ones for values."""
    of_query = tl.load(q_norm + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_norm + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query[:, None], of_query, tl.where(is_key[:, None], of_key, 1.0))
