"""The definition: pairs (x[i], x[i + half]) of a head rotated by the angle of the token's position, then written.

A head's first 2 * half elements rotate; the rest stays. Keys and values go to their tokens' places in the caches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.norms.reference import rms_norm

Floats = NDArray[np.floating]


def rotate(head: Floats, cos: Floats, sin: Floats) -> NDArray[np.float64]:
    """One head [D] rotated by angles given as cos, sin: [half] (Su et al. 2021, half-split layout)."""
    out, half = head.astype(np.float64), len(cos)
    for i in range(half):
        first, second = float(head[i]), float(head[i + half])
        out[i] = first * cos[i] - second * sin[i]
        out[i + half] = second * cos[i] + first * sin[i]
    return out


def rotate_and_write(
    qkv: Floats,
    positions: NDArray[np.integer],
    cos: Floats,
    sin: Floats,
    k_cache: NDArray[np.float64],
    v_cache: NDArray[np.float64],
    kv_slots: NDArray[np.integer],
    num_heads: int,
    q_norm: Floats | None = None,
    k_norm: Floats | None = None,
    eps: float = 0.0,
) -> NDArray[np.float64]:
    """Rotated queries [T, heads, D] float64; keys, rotated too, and values are written to the caches in place.

    qkv: [T, heads + 2 * kv_heads, D]. positions, kv_slots: [T]; a kv_slot, block * block_size + offset, beyond the
    caches is padding and not written. cos, sin: [positions, half]. Caches: [blocks, kv_heads, block_size, D]. q_norm,
    k_norm: [D], an RMS norm of every head before it rotates (Qwen 3), or None.
    """
    _, kv_heads, block_size, head_dim = k_cache.shape
    queries = np.empty((len(qkv), num_heads, head_dim))
    for t, heads in enumerate(qkv):
        c, s = cos[positions[t]], sin[positions[t]]
        block, offset = divmod(int(kv_slots[t]), block_size)
        for head in range(num_heads):
            q = heads[head] if q_norm is None else rms_norm(heads[head], q_norm, eps)
            queries[t, head] = rotate(q, c, s)
        for head in range(kv_heads if block < len(k_cache) else 0):
            k = heads[num_heads + head] if k_norm is None else rms_norm(heads[num_heads + head], k_norm, eps)
            k_cache[block, head, offset] = rotate(k, c, s)
            v_cache[block, head, offset] = heads[num_heads + kv_heads + head]
    return queries
