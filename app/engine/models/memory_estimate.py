"""How much memory a model takes: weights, KV blocks and rank rows. A device's own needs (activations, tables,
alignment) are not included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import AttentionSpec, ModelSpec
from app.engine.models.weight_names import expected_tensors


def num_weights(spec: ModelSpec) -> int:
    """Numbers in all of the model's tensors."""
    return sum(math.prod(shape) for shape in expected_tensors(spec).values())


def kv_block_bytes(spec: ModelSpec, block_size: int, element_bytes: int) -> int:
    """Keys and values of one block in every layer, or the latents instead."""
    width = sum(_numbers_per_token(layer.attention) for layer in spec.layers)
    return width * block_size * element_bytes


def rank_row_bytes(spec: ModelSpec, element_bytes: int, targets: Sequence[str] | None = None) -> int:
    """One rank row of every module in the shared LoRA tables, or of these targets: a row of a and a row of b."""
    layers = (layer_linear_modules(spec, layer) for layer in range(len(spec.layers)))
    singles = (module for modules in layers for module in modules if module.has_rank_rows)
    if targets is None:
        return element_bytes * sum(module.row_size for module in singles)
    widths = ((module.d_in, *each) for module in singles for each in zip(module.targets, module.widths, strict=True))
    return element_bytes * sum(d_in + width for d_in, target, width in widths if target in targets)


def _numbers_per_token(attention: AttentionSpec) -> int:
    if attention.latent is not None:
        return attention.latent.width
    return 2 * attention.num_kv_heads * attention.head_dim
