"""Names of a program's arrays: weights, adapter tables, KV memory, a step's result.

The NamedTuples hold arrays or, field by field, their shapes or shardings. L layers, S adapter slots, R rank rows. Axes
that tensor-parallel devices divide hold the shards one after the other; a separate axis of length 1 for them would cost
copies (XLA gives it a layout of its own).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Mesh axes along which experts, and columns of an expert, are divided.
EXPERT_AXIS, TENSOR_AXIS = "expert", "tensor"
#: Both axes as one, over which everything else is divided.
SHARD_AXES = (EXPERT_AXIS, TENSOR_AXIS)


class XlaLayers(NamedTuple):
    """Weights of all layers. Arrays that a model does not have are None.

    modules: by name, [L, shards * columns, d_in] of a module that is split on its output, [L, columns, shards * d_in]
    of one that is split on its input, L counting the layers that have it; of experts, L is (expert shards) * layers *
    (experts of a shard). biases: by name, [L, shards * columns] and [L, columns], of experts with the same L. Norms:
    [L, H]; q_norm, k_norm: [L, D], or of all heads together [L, shards * heads * D]. rope, window: [L] int32, index
    into the rope tables and visible keys (0: all). scale: [L]. sinks: [L, shards * heads]. query_latent_norm,
    latent_norm: [L, their widths]. Latent heads lie like experts: (shards) * layers * (heads of a shard).
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
    """All weights.

    embedding: [V, H], or None if its rows are read from the head (tied, one shard). head: [1, V rounded up to all
    shards', H]. final_norm: [H]. cos, sin: [ropes, positions, D / 2].
    """

    embedding: Any
    head: Any
    final_norm: Any
    cos: Any
    sin: Any
    layers: XlaLayers


class ExpertPages(NamedTuple):
    """LoRA rows of experts in pages. a, b: by target, [pages * 8, d_in] and [pages * 8, columns]."""

    a: dict[str, Any]
    b: dict[str, Any]


class RankTables(NamedTuple):
    """Weights of resident adapters.

    a, b: by target, [L, R, d_in] and [L, R, columns], an adapter's rows one after the other. scales, shifts: by module,
    [L, R / 8 + 1, columns], empty if adapters may have none; an adapter's at its first rank row / 8, the base's (1 and
    0) at the end.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    scales: dict[str, Any]
    shifts: dict[str, Any]
    experts: ExpertPages | None = None


class ExpertPageTables(NamedTuple):
    """Linked lists of adapters' pages, int32; page N belongs to no adapter and ends every list.

    first_pages: [L, experts * S], an adapter's first page of an expert. next_pages: [N + 1], the page after each.
    ranks: by module, [N + 1, modules], rank rows in a page.
    """

    first_pages: Any
    next_pages: Any
    ranks: dict[str, Any]


class AdapterPlaces(NamedTuple):
    """Locations of adapters' rows, int32. starts: [S], first rank row. ranks: by module, [L, S, modules], 0 for none.

    experts: None if there is no room for adapters of experts.
    """

    starts: Any
    ranks: dict[str, Any]
    experts: ExpertPageTables | None = None


class KvMemory(NamedTuple):
    """Paged KV memory.

    keys, values: [L, blocks, shards * kv_heads, block_size, D]. With latent attention keys are [L, blocks, 1,
    block_size, width]: latents with the rotated part, on every device, and values are None.
    """

    keys: Any
    values: Any


class StepResult(NamedTuple):
    """A step's outputs. token_ids: [B] int32, the largest logit's; top: [B], that logit; logits: [B, V]."""

    token_ids: Any
    top: Any
    logits: Any
