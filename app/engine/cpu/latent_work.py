"""Scratch of latent attention on a CPU, for the largest step.

In: a model's spec and how many tokens a step has at most. Out: a `LatentWork`, or None for other attention.
Every token's pairs with all heads never change: they are written here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.latents import LatentWork
from app.engine.cpu.weights import padded
from app.engine.models.spec import ModelSpec
from app.kernels.moe_lora.routing import empty_pairs


def latent_workspace(spec: ModelSpec, num_tokens: int) -> LatentWork | None:
    """All layers share it."""
    attention = spec.layers[0].attention
    latent, heads = attention.latent, attention.num_heads
    if latent is None:
        return None

    def rows(count: int, width: int) -> NDArray[np.float32]:
        return np.zeros((count, width), np.float32)

    pairs = empty_pairs(num_tokens, heads, heads)
    pairs.experts[:] = np.arange(heads)
    rank = latent.query_rank
    with_rank = 0 if rank is None else num_tokens
    return LatentWork(
        pairs=pairs,
        queries=rows(num_tokens, padded(heads * attention.head_dim)),
        query_latents=rows(with_rank, padded(rank or 0)),
        normed_query_latents=rows(with_rank, rank or 0),
        latents=rows(num_tokens, padded(latent.width)),
        own=rows(num_tokens * heads, latent.key_size),
        absorbed=rows(num_tokens * heads, latent.kv_rank),
        values=rows(num_tokens * heads, latent.value_size),
        shrunk=np.zeros((num_tokens * heads, 1, 16), np.float32),
    )
