"""The definition of routing: one token at a time, in float64.

p = softmax(logits), of chosen groups only; the K largest p, ties to the lower index; each over their sum if normalised,
times a scale (Shazeer et al. 2017; groups: DeepSeek-AI 2024)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Routing(NamedTuple):
    """experts: [T, K] int64, the largest weight first. topk_weights: [T, K] float64."""

    experts: NDArray[np.int64]
    topk_weights: NDArray[np.float64]


def route(
    logits: NDArray[np.floating],
    top_k: int,
    *,
    normalised: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Route logits [T, E]. The top_groups of num_groups groups of neighbours with the largest single probabilities are
    chosen from; the others count as zero.
    """
    num_tokens, num_experts = logits.shape
    experts, topk_weights = np.zeros((num_tokens, top_k), np.int64), np.zeros((num_tokens, top_k))
    for t in range(num_tokens):
        p = np.exp(logits[t].astype(np.float64) - logits[t].max())
        p /= p.sum()
        best = p.reshape(num_groups, -1).max(axis=1)
        kept = np.argsort(-best, kind="stable")[:top_groups]
        p = np.where(np.isin(np.arange(num_experts) // (num_experts // num_groups), kept), p, 0.0)
        experts[t] = np.argsort(-p, kind="stable")[:top_k]
        topk_weights[t] = p[experts[t]]
        if normalised:
            topk_weights[t] /= topk_weights[t].sum()
    return Routing(experts, topk_weights * scale)
