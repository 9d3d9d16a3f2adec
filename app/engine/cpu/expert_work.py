"""Scratch of a mixture of experts on a CPU, for the largest step.

In: a model's spec and how many tokens a step has at most. Out: an `ExpertWork`, or None for a model without experts.
Memory that no step has needed yet is not there: only its addresses are taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.experts import ExpertWork
from app.engine.cpu.weights import padded
from app.engine.models.products import stacked_products
from app.engine.models.spec import ModelSpec
from app.kernels.moe_lora.routing import empty_pairs


def expert_workspace(spec: ModelSpec, num_tokens: int) -> ExpertWork | None:
    """All layers with experts share it."""
    products = {product.name: product for product, _ in stacked_products(spec)}
    mixture = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    if mixture is None:
        return None
    router = mixture.router
    num_pairs, expert_size = num_tokens * router.top_k, products["experts_down"].d_in
    shared_size = products["shared_down"].d_in if "shared_down" in products else 0

    def rows(count: int, width: int) -> NDArray[np.float32]:
        return np.zeros((count, width), np.float32)

    return ExpertWork(
        pairs=empty_pairs(num_tokens, router.top_k, router.num_experts),
        logits=rows(num_tokens, padded(router.num_experts)),
        inputs=rows(num_pairs, spec.hidden_size),
        gate_up=rows(num_pairs, 2 * padded(expert_size)),
        gated=rows(num_pairs, expert_size),
        outputs=rows(num_pairs, padded(spec.hidden_size)),
        shrunk=np.zeros((num_pairs, 2, 16), np.float32),
        gates=rows(num_tokens if "shared_gate" in products else 0, padded(1)),
        shared_gate_up=rows(num_tokens if shared_size else 0, 2 * padded(shared_size)),
        shared_gated=rows(num_tokens if shared_size else 0, shared_size),
        shared=rows(num_tokens if shared_size else 0, padded(spec.hidden_size)),
    )
