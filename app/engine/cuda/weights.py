"""A checkpoint's tensors on a device: fused linear modules, norms in float32, one object per layer.

At most one tensor is in host memory besides the checkpoint's own; every tensor has exactly one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.models.linear_modules import LATENT_B, LinearModule, absorbed_modules, layer_linear_modules
from app.engine.models.spec import LayerSpec, ModelSpec
from app.engine.models.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    LATENT_NORMS,
    LAYER_NORMS,
    LM_HEAD,
    SINKS,
    checked_tensors,
    expected_tensors,
)


@dataclass(slots=True)
class LayerWeights:
    """One layer.

    modules: weights [d_out, d_in] by the module's name, of experts [E, d_out, d_in]; biases: [d_out] or [E, d_out] of
    those that have one. Norms: [H], [head_dim] or that of all heads, float32; sinks: [heads], float32.
    `absorbed_modules` replace `kv_b_proj`, with heads in place of experts: [N, d_out, d_in].
    """

    spec: LayerSpec
    attention_norm: Tensor
    mlp_norm: Tensor
    modules: dict[str, Tensor]
    biases: dict[str, Tensor]
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    sinks: Tensor | None = None
    query_latent_norm: Tensor | None = None
    latent_norm: Tensor | None = None


@dataclass(slots=True)
class Weights:
    """The whole model. `head` [V, H] is `embedding` itself if they are tied."""

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
    """Consume every tensor. Raises CheckpointError for one that has no place or is missing."""
    weights = _empty(spec, max_positions, device, dtype)
    places = _places(spec, weights)
    for name, values in checked_tensors(spec, tensors):
        places[name].copy_(to_tensor(values))
    return weights


def to_tensor(values: NDArray[Any]) -> Tensor:
    """A tensor with the array's values, in its type; a copy if the array is read-only."""
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

    def floats(name: str) -> Tensor | None:
        return torch.empty(shapes[name], dtype=torch.float32, device=device) if name in shapes else None

    layers = []
    for index, layer in enumerate(spec.layers):
        prefix = f"model.layers.{index}."
        modules, biases = {}, {}
        for module in _stored_modules(spec, index):
            experts = () if module.num_experts is None else (module.num_experts,)
            modules[module.name] = empty(*experts, module.width(), module.d_in)
            if module.has_bias:
                biases[module.name] = empty(*experts, module.width())
        cos, sin = angles[layer.attention.rope]
        layers.append(
            LayerWeights(
                spec=layer,
                **{name: floats(f"{prefix}{path}.weight") for name, path in (LAYER_NORMS | LATENT_NORMS).items()},  # type: ignore[arg-type]
                cos=cos,
                sin=sin,
                modules=modules,
                biases=biases,
                sinks=floats(f"{prefix}{SINKS}"),
            )
        )
    embedding = empty(spec.vocab_size, spec.hidden_size)
    head = embedding if spec.tie_embeddings else empty(spec.vocab_size, spec.hidden_size)
    return Weights(embedding, head, torch.empty(spec.hidden_size, dtype=torch.float32, device=device), layers)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The destination of `kv_b_proj` by head: its rows of keys [N, P, R] and of values [N, V, R]."""

    keys: Tensor
    values: Tensor

    def copy_(self, whole: Tensor) -> None:
        """whole: [N * (P + V), R]."""
        by_head = whole.view(len(self.keys), -1, whole.shape[1])
        self.keys.copy_(by_head[:, : self.keys.shape[1]])
        self.values.copy_(by_head[:, self.keys.shape[1] :])


def _stored_modules(spec: ModelSpec, layer: int) -> tuple[LinearModule, ...]:
    """A layer's modules that have weights, with `kv_b_proj` as its two absorbed parts."""
    modules = tuple(one for one in layer_linear_modules(spec, layer) if one.kind is not LATENT_B)
    return (*modules, *absorbed_modules(spec.layers[layer].attention))


def _places(spec: ModelSpec, weights: Weights) -> dict[str, Tensor | _Heads]:
    """Name of every tensor -> the view that it is copied into."""
    places: dict[str, Tensor | _Heads] = {EMBEDDING: weights.embedding, FINAL_NORM: weights.final_norm}
    if not spec.tie_embeddings:
        places[LM_HEAD] = weights.head
    expected = expected_tensors(spec)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        if layer.spec.attention.latent is not None:
            keys, values = (layer.modules[one.name] for one in absorbed_modules(layer.spec.attention))
            path = LATENT_B.path(LATENT_B.targets[0])
            places[f"{prefix}{path}.weight"] = _Heads(keys.transpose(1, 2), values)
        for module in layer_linear_modules(spec, index):
            if module.kind is LATENT_B:
                continue
            weight, bias = layer.modules[module.name], layer.biases.get(module.name)
            for target, expert in itertools.product(module.targets, module.experts):
                name, columns = f"{prefix}{module.kind.path(target, expert)}", module.columns(target)
                places[f"{name}.weight"] = (weight if expert is None else weight[expert])[columns]
                if bias is not None:
                    places[f"{name}.bias"] = (bias if expert is None else bias[expert])[columns]
        if layer.sinks is not None:
            places[f"{prefix}{SINKS}"] = layer.sinks
        for norm, path in (LAYER_NORMS | LATENT_NORMS).items():
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
