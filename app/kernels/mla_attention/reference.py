"""The definition of latent attention: every head's keys and values are written out, in float64.

Multi-head latent attention (DeepSeek-AI 2024): a token has one latent c [R] and one rotated part k [E]; head h's key is
[K_h c, k] and its value V_h c. Letters: T queries and keys of one sequence, N heads, P numbers of a head's own key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def latent_attention(
    queries: Floats, latents: Floats, rotated: Floats, keys: Floats, values: Floats, scale: float
) -> NDArray[np.float64]:
    """[T, N, V]: softmax(scale * q k^T) v over the keys up to the query's own.

    queries: [T, N, P + E]; latents: [T, R]; rotated: [T, E]; keys: [N, P, R]; values: [N, V, R].
    """
    num_tokens, num_heads, _ = queries.shape
    out = np.zeros((num_tokens, num_heads, values.shape[1]))
    for head in range(num_heads):
        own = np.concatenate([latents.astype(np.float64) @ keys[head].T, rotated], axis=1)  # [T, P + E]
        value = latents.astype(np.float64) @ values[head].T  # [T, V]
        for t in range(num_tokens):
            scores = scale * (own[: t + 1] @ queries[t, head].astype(np.float64))
            shares = np.exp(scores - scores.max())
            out[t, head] = shares @ value[: t + 1] / shares.sum()
    return out


def rotate_neighbours(x: Floats, cos: Floats, sin: Floats) -> NDArray[np.float64]:
    """Rotate each pair of numbers 2i and 2i + 1 of x [..., E] by the angle of cos and sin [..., E / 2]."""
    first, second = x[..., ::2].astype(np.float64), x[..., 1::2].astype(np.float64)
    return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
