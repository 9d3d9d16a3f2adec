"""Names of a base model's modules, as adapters spell them: path → (layer, targets, expert).

A fused path (`qkv_proj`, `gate_up_proj`) means several targets, in the order of its output rows, with one A for all of
them. Paths are the transformers library's; an expert's has its number: "mlp.experts.3.down_proj".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from app.engine.adapters.adapter import LoraKey
from app.engine.models.hf.encoder_weight_names import LAYERS as ENCODER_LAYERS
from app.engine.models.linear_modules import (
    DENSE,
    ENCODER,
    EXPERTS,
    ROUTERS,
    ModuleKind,
    layer_linear_modules,
    router_kind,
    shared_kinds,
    target_shape,
)
from app.engine.models.spec import ModelSpec

DECODER_LAYERS = "model.layers"
#: Modules outside the layers that an adapter may name.
OUTER_MODULES = ("model.embed_tokens", "lm_head")
#: Follows an encoder's last hidden state, so no embedding depends on it; but `target_modules: ["dense"]` and
#: "all-linear" train it too.
UNREAD_MODULE = "pooler.dense"
_LAYER = re.compile(r"(?:model\.layers|encoder\.layer)\.(\d{1,4})\.")
_EXPERT = re.compile(r"model\.layers\.(\d{1,4})\.mlp\.experts\.(\d{1,4})\.")
_SHARED = re.compile(r"model\.layers\.\d{1,4}\.mlp\.(shared_experts?)[._]")


class Module(NamedTuple):
    """A linear module of a layer: the targets whose rows its output has, in order, and its expert or None."""

    layer: int
    targets: tuple[str, ...]
    expert: int | None = None

    @property
    def is_fused(self) -> bool:
        return len(self.targets) > 1

    @property
    def keys(self) -> tuple[LoraKey, ...]:
        return tuple(LoraKey(self.layer, target, self.expert) for target in self.targets)

    def shape(self, spec: ModelSpec) -> tuple[int, tuple[int, ...]]:
        """(d_in, d_out of each target) in this base model."""
        shapes = [target_shape(spec, self.layer, target) for target in self.targets]
        return shapes[0][0], tuple(d_out for _, d_out in shapes)


def layer_modules(spec: ModelSpec) -> dict[str, Module]:
    """Path → module, split and fused, in layer order."""
    layers = DECODER_LAYERS if spec.encoder is None else ENCODER_LAYERS
    return {
        path: module
        for layer in range(len(spec.layers))
        for linear in layer_linear_modules(spec, layer)
        for expert in linear.experts
        for path, module in _modules(layers, linear.kind, layer, expert)
    }


def assumed_modules(paths: Iterable[str]) -> dict[str, Module]:
    """The same for an unknown base: its layers and experts are those that the paths name."""
    found = list(paths)
    num_layers = 1 + max((int(match[1]) for match in map(_LAYER.match, found) if match), default=-1)
    if any(path.startswith(f"{ENCODER_LAYERS}.") for path in found):
        of_encoder = [(layer, kind) for layer in range(num_layers) for kind in ENCODER]
        return dict(one for layer, kind in of_encoder for one in _modules(ENCODER_LAYERS, kind, layer, None))
    kinds = [*DENSE, *(router_kind(name) for name in ROUTERS if any(path.endswith(f".mlp.{name}") for path in found))]
    for name in {match[1] for match in map(_SHARED.match, found) if match}:
        kinds += shared_kinds(name)
    modules = {
        path: module
        for layer in range(num_layers)
        for kind in kinds
        for path, module in _modules(DECODER_LAYERS, kind, layer, None)
    }
    for layer, expert in sorted({(int(match[1]), int(match[2])) for match in map(_EXPERT.match, found) if match}):
        modules.update(one for kind in EXPERTS for one in _modules(DECODER_LAYERS, kind, layer, expert))
    return modules


def _modules(layers: str, kind: ModuleKind, layer: int, expert: int | None) -> Iterator[tuple[str, Module]]:
    for target in kind.targets:
        yield f"{layers}.{layer}.{kind.path(target, expert)}", Module(layer, (target,), expert)
    if kind.fused is not None:
        yield f"{layers}.{layer}.{kind.path(kind.fused, expert)}", Module(layer, kind.targets, expert)
