"""A checkpoint's tensors on a device: q/k/v and gate/up fused, norms in float32, one object per layer.

In: tensors by their Hugging Face names, one at a time. Out: `Weights`. At most one tensor is in host memory
beside the checkpoint's own; every tensor has exactly one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.errors import CheckpointError
from app.engine.models.names import EMBEDDING, FINAL_NORM, LAYER_NORMS, LM_HEAD, expected_tensors
from app.engine.models.products import layer_products
from app.engine.models.spec import LayerSpec, ModelSpec


@dataclass(slots=True)
class LayerWeights:
    """One layer. Weights are [d_out, d_in], biases [d_out] or None; norms [H] or [head_dim] float32."""

    spec: LayerSpec
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor


@dataclass(slots=True)
class Weights:
    """The whole model. `head` is `embedding` itself where they are tied: [V, H]."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[LayerWeights]


def load_weights(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, NDArray[Any]]],
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    """Consume every tensor; CheckpointError for one that has no place or is missing."""
    weights = _empty(spec, max_positions, device, dtype)
    places = _places(spec, weights)
    for name, values in tensors:
        place = places.pop(name, None)
        if place is None:
            raise CheckpointError(f"tensor {name!r} has no place in {spec.name}, or came twice")
        place.copy_(to_tensor(values))
    if places:
        raise CheckpointError(f"{spec.name} lacks {len(places)} tensors, the first: {min(places)!r}")
    return weights


def to_tensor(values: NDArray[Any]) -> Tensor:
    """A tensor with the array's values, in its type; a copy where the array may not be written."""
    values = np.require(values, requirements=("C", "W"))
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _empty(spec: ModelSpec, max_positions: int, device: torch.device, dtype: torch.dtype) -> Weights:
    shapes = expected_tensors(spec)
    angles = {
        rope: _angles(rope.inv_freq, rope.attention_factor, max_positions, device)
        for rope in {layer.attention.rope for layer in spec.layers}
    }

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(name: str) -> Tensor | None:
        return torch.empty(shapes[name], dtype=torch.float32, device=device) if name in shapes else None

    layers = []
    for index, layer in enumerate(spec.layers):
        prefix = f"model.layers.{index}."
        arrays: dict[str, Tensor | None] = {}
        for product in layer_products(spec, index):
            arrays[product.name] = empty(product.width(), product.d_in)
            arrays[f"{product.name}_bias"] = empty(product.width()) if product.has_bias else None
        cos, sin = angles[layer.attention.rope]
        layers.append(
            LayerWeights(
                spec=layer,
                **{name: norm(f"{prefix}{path}.weight") for name, path in LAYER_NORMS.items()},  # type: ignore[arg-type]
                cos=cos,
                sin=sin,
                **arrays,  # type: ignore[arg-type]
            )
        )
    embedding = empty(spec.vocab_size, spec.hidden_size)
    head = embedding if spec.tie_embeddings else empty(spec.vocab_size, spec.hidden_size)
    return Weights(embedding, head, torch.empty(spec.hidden_size, dtype=torch.float32, device=device), layers)


def _places(spec: ModelSpec, weights: Weights) -> dict[str, Tensor]:
    """Name of every tensor -> the view it is copied into."""
    places = {EMBEDDING: weights.embedding, FINAL_NORM: weights.final_norm}
    if not spec.tie_embeddings:
        places[LM_HEAD] = weights.head
    expected = expected_tensors(spec)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        for product in layer_products(spec, index):
            for target in product.targets:
                name, columns = f"{prefix}{product.kind.path(target)}", product.columns(target)
                places[f"{name}.weight"] = getattr(layer, product.name)[columns]
                if product.has_bias:
                    places[f"{name}.bias"] = getattr(layer, f"{product.name}_bias")[columns]
        for norm, path in LAYER_NORMS.items():
            if getattr(layer, norm) is not None:
                places[f"{prefix}{path}.weight"] = getattr(layer, norm)
    assert places.keys() == expected.keys(), "one place for every tensor the spec implies"
    return places


def _angles(
    inv_freq: tuple[float, ...], factor: float, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D / 2], angles in float32 as transformers computes them."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * torch.tensor(inv_freq, dtype=torch.float32)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
