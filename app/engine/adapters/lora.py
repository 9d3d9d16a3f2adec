"""An adapter's weights, ready to be written to device tables.

Every reader (PEFT folder, Arrow card) returns the same `LoraAdapter`; what the adapter was saved as
cannot be told from it. The scale is already folded into b, in float32; nothing downstream knows
alpha. Arrays are read-only: many replicas on one machine may map the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.card import AdapterCard

#: Modules of a decoder layer that carry low-rank deltas, in the order they are applied.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraKey(NamedTuple):
    """Where a delta applies: layer index, module name (one of `TARGETS`), expert or None."""

    layer: int
    target: str
    expert: int | None = None


class LoraPair(NamedTuple):
    """One module's delta `y += b.T @ (a @ x)`.

    a: `[r, d_in]` float32 (PEFT's lora_A). b: `[r, d_out]` float32: PEFT's lora_B transposed, times
    the scale (alpha/r, or alpha/sqrt(r) for rsLoRA: Hu et al. 2021; Kalajdzievski 2023).
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A validated adapter: its card and one `LoraPair` per touched module."""

    card: AdapterCard
    weights: Mapping[LoraKey, LoraPair]
