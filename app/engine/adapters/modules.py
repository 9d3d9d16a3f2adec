"""Names of a base model's modules, as adapters spell them.

In: a number of layers. Out: which (layer, targets) each module path means. A fused path (`qkv_proj`,
`gate_up_proj`) means several targets at once, in the order of its output rows; the same A serves
all of them. Adapters name modules by the transformers library's paths.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.models.encoder_names import LAYERS as ENCODER_LAYERS
from app.engine.models.products import DENSE, ENCODER, target_shape
from app.engine.models.spec import ModelSpec

#: Modules outside the layers that an adapter may name.
OUTER_MODULES = ("model.embed_tokens", "lm_head")
#: What comes behind an encoder's last hidden state, so that no embedding depends on it: `target_modules: ["dense"]` and
#: "all-linear" train it along.
UNREAD_MODULE = "pooler.dense"
#: What an encoder's adapters may do beyond plain LoRA.
ENCODER_FEATURES = frozenset({"DoRA", "lora_bias"})


class Module(NamedTuple):
    """A linear module of a layer, and the targets whose rows its output holds, in order."""

    layer: int
    targets: tuple[str, ...]

    @property
    def is_fused(self) -> bool:
        return len(self.targets) > 1

    def shape(self, spec: ModelSpec) -> tuple[int, tuple[int, ...]]:
        """(d_in, d_out of each target) in this base model."""
        shapes = [target_shape(spec, self.layer, target) for target in self.targets]
        return shapes[0][0], tuple(d_out for _, d_out in shapes)


def layer_modules(num_layers: int, *, is_encoder: bool = False) -> dict[str, Module]:
    """Path → module, split and fused, in layer order."""
    kinds, layers = (ENCODER, ENCODER_LAYERS) if is_encoder else (DENSE, "model.layers")
    split = {kind.path(target): (target,) for kind in kinds for target in kind.targets}
    fused = {kind.path(kind.fused): kind.targets for kind in kinds if kind.fused is not None}
    return {
        f"{layers}.{layer}.{path}": Module(layer, targets)
        for layer in range(num_layers)
        for path, targets in (split | fused).items()
    }
