"""The arrays that a program is given and gives back: weights, adapter tables, KV memory, what a step leaves.

In: nothing; these are names. Out: NamedTuples of arrays, or, field by field, of their shapes or shardings. L layers, S
adapter slots, R rank rows. Axes that tensor-parallel devices divide hold the shards one after the other; an axis of
length 1 for them would cost copies (XLA gives it a layout of its own).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Names of the mesh axes that experts, and columns of an expert, lie along.
EXPERT_AXIS, TENSOR_AXIS = "expert", "tensor"
#: The axes that everything else is divided over, as one.
SHARD_AXES = (EXPERT_AXIS, TENSOR_AXIS)


class XlaLayers(NamedTuple):
    """Weights of all layers. What a model does not have is None.

    products: by name, [L, shards * columns, d_in] of a product that is split on its output, [L, columns, shards * d_in]
    of one that is split on its input, L counting the layers that have it; of experts, L is (expert shards) * layers *
    (experts of a shard). biases: by name, [L, shards * columns] and [L, columns], of experts with the same L. Norms:
    [L, H]; q_norm, k_norm: [L, D], or of all heads together [L, shards * heads * D]. rope, window: [L] int32, index
    into the rope tables and keys visible (0 is all).
    scale: [L]. sinks: [L, shards * heads]. query_latent_norm, latent_norm: [L, their widths]. Heads
    of latents lie like experts: (shards) * layers * (heads of a shard).
    """

    modules: dict[str, Any]
    biases: dict[str, Any]
    attention_norm: Any
    mlp_norm: Any
    q_norm: Any
    k_norm: Any
    rope: Any
    window: Any
    scale: Any
    sinks: Any
    query_latent_norm: Any
    latent_norm: Any


class XlaWeights(NamedTuple):
    """embedding: [V, H], or None where its rows are read from the head (tied, one shard). head: [1, V rounded up to
    all shards', H].

    final_norm: [H]. cos, sin: [ropes, positions, D / 2].
    """

    embedding: Any
    head: Any
    final_norm: Any
    cos: Any
    sin: Any
    layers: XlaLayers


class ExpertPages(NamedTuple):
    """Rank rows of experts. a, b: by target, [pages * 8, d_in] and [pages * 8, columns]."""

    a: dict[str, Any]
    b: dict[str, Any]


class RankTables(NamedTuple):
    """What resident adapters hold. a, b: by target, [L, R, d_in] and [L, R, columns], an adapter's rows one after the
    other. scales, shifts: by product, [L, R / 8 + 1, columns], empty where adapters may
    have none; an adapter's at its first rank row / 8, the base's (1 and 0) at the end.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    scales: dict[str, Any]
    shifts: dict[str, Any]
    experts: ExpertPages | None = None


class ExpertPageTables(NamedTuple):
    """Where adapters' pages lie, int32; page N is nobody's. heads: [L, experts * S], an adapter's first page of an
    expert. following: [N + 1], the page after each. ranks: by product, [N + 1, modules], rank rows in a page.
    """

    first_pages: Any
    next_pages: Any
    ranks: dict[str, Any]


class AdapterPlaces(NamedTuple):
    """Where adapters' rows lie, int32. starts: [S], first rank row. ranks: by product, [L, S, modules], 0 for none.

    experts: None where there is no room for adapters of experts.
    """

    starts: Any
    ranks: dict[str, Any]
    experts: ExpertPageTables | None = None


class KvMemory(NamedTuple):
    """keys, values: [L, blocks, shards * kv_heads, block_size, D]. Of latent attention keys are
    [L, blocks, 1, block_size, width]: latents with what is rotated, on every device, and values are None."""

    keys: Any
    values: Any


class StepResult(NamedTuple):
    """token_ids: [B] int32, the largest logit's; top: [B], that logit; logits: [B, V]."""

    token_ids: Any
    top: Any
    logits: Any
