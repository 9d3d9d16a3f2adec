"""Llama-shaped models of random weights, adapters for them, and steps: everything but the numbers is real.

Weights and adapters are cut from one stretch of random numbers, so that making them costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.card import AdapterCard
from app.engine.batch import ForwardBatch
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.models.rope import rope_spec
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from app.engine.models.weight_names import expected_tensors
from load_tests.engine.steps import Piece, forward_batch

RANK = 16
BLOCK_SIZE = 16


class Shape(NamedTuple):
    """Sizes of a Llama. `tied`: the output is the embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool


SHAPES = {
    "tiny": Shape(2, 64, 4, 2, 16, 96, 200, True),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128_256, True),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, False),
}


def model_spec(name: str, shape: Shape) -> ModelSpec:
    """Llama 3's, with its angles."""
    rope = rope_spec({"rope_theta": 500_000.0}, shape.head_dim, 8192)
    attention = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, rope)
    layer = LayerSpec(attention, MlpSpec(shape.mlp))
    return ModelSpec(
        f"llama-{name}", "llama", f"random {name}", shape.vocab, shape.hidden, 8192, 1e-5, shape.tied,
        (layer,) * shape.layers, 1, (2,),
    )  # fmt: skip


def random_tensors(spec: ModelSpec, device: torch.device) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every tensor of the spec in bfloat16, cut from one stretch of random numbers; norms are one."""
    shapes = expected_tensors(spec)
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    numbers = torch.empty(largest + 1000, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    pool = numbers.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    for index, (name, shape) in enumerate(shapes.items()):
        size = int(np.prod(shape))
        start = index % 1000
        yield name, np.ones(shape, np.float32) if len(shape) == 1 else pool[start : start + size].reshape(shape)


class RandomAdapters:
    """Adapters over every module, float32 in host memory as the engine gets them; cut from one stretch of numbers."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        widest = max(max(target_shape(spec, 0, target)) for target in DENSE_TARGETS)
        rng = np.random.default_rng(0)
        self._pool = rng.standard_normal(RANK * widest + 100_000, np.float32) * np.float32(0.01)
        self._pool.flags.writeable = False

    def adapter(self, index: int, targets: Sequence[str] = DENSE_TARGETS, *, apart: bool = False) -> LoraAdapter:
        """`apart`: in memory of its own, as large as a real one's, so that reading it takes a real one's time."""
        weights = {}
        for layer in range(len(self._spec.layers)):
            for n, target in enumerate(targets):
                start = (index * 7919 + layer * 131 + n * 17) % 100_000 // 4 * 4
                d_in, d_out = target_shape(self._spec, layer, target)
                parts = [self._pool[start : start + RANK * width].reshape(RANK, width) for width in (d_in, d_out)]
                weights[LoraKey(layer, target)] = LoraPair(*(part.copy() if apart else part for part in parts))
        size = sum(pair.a.nbytes + pair.b.nbytes for pair in weights.values())
        card = AdapterCard(f"{index:064x}", self._spec.digest, RANK, tuple(sorted(targets)), "F32", size)
        return LoraAdapter(card, weights)


def batch_of(
    lengths: list[int], starts: list[int], adapter_slots: list[int], table_width: int, vocab: int
) -> ForwardBatch:
    """Greedy sequences sorted by slot: `lengths[i]` tokens from position `starts[i]`; sequence i owns its blocks."""
    count = len(lengths)
    tables = np.arange(count * table_width, dtype=np.int32).reshape(count, table_width)
    pieces = [
        Piece((np.arange(start, start + length) * 7 + index * 13) % vocab, start, tables[index], slot)
        for index, (length, start, slot) in enumerate(zip(lengths, starts, adapter_slots, strict=True))
    ]
    return forward_batch(pieces, BLOCK_SIZE)
