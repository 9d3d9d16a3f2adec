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
from app.engine.models.names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_tensors
from app.engine.models.spec import LayerSpec, ModelSpec

#: Fused product -> its modules (targets of `app.engine.adapters.lora.TARGETS`), side by side in its output.
PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
PRODUCT_OF = {target: product for product, targets in PRODUCTS.items() for target in targets}


@dataclass(slots=True)
class LayerWeights:
    """One layer. Weights are [d_out, d_in], biases [d_out] or None; norms [H] or [head_dim] float32."""

    spec: LayerSpec
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None
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


def columns_of(spec: ModelSpec, layer: int) -> dict[str, tuple[str, int, int]]:
    """Target -> (product, first column, end) in the product's output."""
    found = {}
    for product, targets in PRODUCTS.items():
        at = 0
        for target in targets:
            width = spec.target_shape(layer, target)[1]
            found[target] = (product, at, at + width)
            at += width
    return found


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
        for product, targets in PRODUCTS.items():
            widths = [spec.target_shape(index, target)[1] for target in targets]
            biased = any(f"{prefix}{path}.bias" in shapes for path in map(_path, targets))
            arrays[product] = empty(sum(widths), spec.target_shape(index, targets[0])[0])
            arrays[f"{product}_bias"] = empty(sum(widths)) if biased else None
        cos, sin = angles[layer.attention.rope]
        layers.append(
            LayerWeights(
                spec=layer,
                attention_norm=norm(f"{prefix}input_layernorm.weight"),  # type: ignore[arg-type]
                mlp_norm=norm(f"{prefix}post_attention_layernorm.weight"),  # type: ignore[arg-type]
                q_norm=norm(f"{prefix}self_attn.q_norm.weight"),
                k_norm=norm(f"{prefix}self_attn.k_norm.weight"),
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
        for target, (product, first, end) in columns_of(spec, index).items():
            name = f"{prefix}{_path(target)}"
            places[f"{name}.weight"] = getattr(layer, product)[first:end]
            if f"{name}.bias" in expected:
                places[f"{name}.bias"] = getattr(layer, f"{product}_bias")[first:end]
        places[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        places[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.q_norm is not None and layer.k_norm is not None:
            places[f"{prefix}self_attn.q_norm.weight"] = layer.q_norm
            places[f"{prefix}self_attn.k_norm.weight"] = layer.k_norm
    assert places.keys() == expected.keys(), "one place for every tensor the spec implies"
    return places


def _path(target: str) -> str:
    return f"{'self_attn' if target in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{target}"


def _angles(
    inv_freq: tuple[float, ...], factor: float, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D / 2], angles in float32 as transformers computes them."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * torch.tensor(inv_freq, dtype=torch.float32)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
