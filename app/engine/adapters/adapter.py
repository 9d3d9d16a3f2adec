"""An adapter's weights, ready to be written to device tables.

Every reader (PEFT folder, Arrow card) returns the same `LoraAdapter`, whatever the storage format. The scale is folded
into b in float32, so no later code knows alpha. Arrays are read-only, because many replicas of a machine may map the
same memory. A matrix that was saved in bfloat16 stays bfloat16 if that holds every scaled value exactly: half the
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.card import AdapterCard
from app.engine.adapters.features import (
    ACTIVATED,
    DORA,
    EMBEDDING_LORA,
    LM_HEAD_LORA,
    LORA_BIAS,
    RESIZED,
    SCORE_HEAD,
    TRAINED_BIASES,
    TRAINED_EMBEDDING,
    TRAINED_LINEAR,
    TRAINED_LM_HEAD,
    TRAINED_NORMS,
    TRAINED_TOKEN_ROWS,
)
from app.engine.errors import AdapterMismatch

#: The type of matrices that take two bytes per value.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: An array in float32, or in bfloat16.
Matrix = NDArray[Any]


def to_float32(values: Matrix) -> NDArray[np.float32]:
    """The values in float32; the array itself if it already is."""
    return values.astype(np.float32, copy=False)


def read_only(values: Matrix) -> Matrix:
    """The array itself, no longer writable."""
    values.setflags(write=False)
    return values


class LoraKey(NamedTuple):
    """Where a delta applies: layer index, target module (`app.engine.models.linear_modules`), expert or None."""

    layer: int
    target: str
    expert: int | None = None

    @property
    def sort_key(self) -> tuple[int, str, int]:
        return self.layer, self.target, -1 if self.expert is None else self.expert


class LoraPair(NamedTuple):
    """One module's delta `y += b.T @ (a @ x)`.

    a: `[r, d_in]` (PEFT's lora_A). b: `[r, d_out]`: PEFT's lora_B transposed, times the scale
    (alpha/r, or alpha/sqrt(r) for rsLoRA: Hu et al. 2021; Kalajdzievski 2023). Each in float32 or bfloat16.
    """

    a: Matrix
    b: Matrix

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


class TokenRows(NamedTuple):
    """Rows that replace rows of an embedding or output matrix: token_ids `[n]`, rows `[n, H]` float32."""

    token_ids: tuple[int, ...]
    rows: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """A validated adapter: its card, one `LoraPair` per target module, and its extra weights.

    N is the adapter's number of tokens: the base's V unless its card has a `vocab_size`. magnitudes: DoRA's m `[d_out]`
    float32: y = m / ‖W + BA‖ ⊙ (W x + B A x) + bias (`app.kernels.dora`). delta_biases (lora_bias): `[d_out]` float32,
    added with the delta, scale folded in. outer: float32 deltas of "embed_tokens" (a `[r, N]`, b `[r, H]`: row t gains
    b.T @ a[:, t]) and of "lm_head". replaced: base tensors that the adapter replaces, by canonical name
    ("model.norm.weight"); "model.embed_tokens.weight" is the input's alone and "lm_head.weight" the output's, even
    where the base ties them, both of N rows; and a score head's tensors. token_rows: replaced rows of "embed_tokens"
    and "lm_head"; ids from V on have a row at both ends. scales, outer_scales: factors already folded into b, where not
    1; only combining adapters needs them.
    """

    card: AdapterCard
    weights: Mapping[LoraKey, LoraPair]
    magnitudes: Mapping[LoraKey, NDArray[np.float32]] = field(default_factory=dict)
    delta_biases: Mapping[LoraKey, NDArray[np.float32]] = field(default_factory=dict)
    outer: Mapping[str, LoraPair] = field(default_factory=dict)
    replaced: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    scales: Mapping[LoraKey, float] = field(default_factory=dict)
    outer_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing at all: every product of a pair has a factor of zeros, and there is nothing else.

        Reads no further than the first pair with values in both matrices.
        """
        has_whole = bool(self.magnitudes or self.replaced or self.token_rows or self.card.vocab_size)
        pairs = (*self.weights.values(), *self.outer.values())
        has_values = has_whole or any(pair.a.any() and pair.b.any() for pair in pairs)
        return not has_values and not any(bias.any() for bias in self.delta_biases.values())

    @property
    def features(self) -> frozenset[str]:
        """What an engine must apply for this adapter's output to be right (`app.engine.adapters.features`)."""
        found = {EMBEDDING_LORA if name == "embed_tokens" else LM_HEAD_LORA for name in self.outer}
        found |= {_replaced_feature(name) for name in self.replaced}
        if self.magnitudes:
            found.add(DORA)
        if self.delta_biases:
            found.add(LORA_BIAS)
        if self.token_rows:
            found.add(TRAINED_TOKEN_ROWS)
        if self.card.invocation_tokens:
            found.add(ACTIVATED)
        if self.card.vocab_size:
            found.add(RESIZED)
        return frozenset(found)


def unknown_module(key: LoraKey) -> AdapterMismatch:
    """The error of an adapter with a module that the engine's model does not have."""
    return AdapterMismatch(f"this engine has no module {key.target!r} (expert {key.expert}) in layer {key.layer}")


def check_features(adapter: LoraAdapter, supported_features: frozenset[str]) -> None:
    """Raise AdapterMismatch if the adapter needs a feature that is not supported."""
    missing = sorted(adapter.features - supported_features)
    if missing:
        raise AdapterMismatch(
            f"this engine cannot apply {' or '.join(missing)}; train the adapter without it, or use engine.cpu"
        )


def _replaced_feature(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if name.startswith(("score.", "classifier.")):
        return SCORE_HEAD
    if kind == "bias":
        return TRAINED_BIASES
    if module.endswith("norm"):
        return TRAINED_NORMS
    return {"model.embed_tokens": TRAINED_EMBEDDING, "lm_head": TRAINED_LM_HEAD}.get(module, TRAINED_LINEAR)
