"""Names of a base model's modules, as adapters spell them.

In: a number of layers. Out: which (layer, targets) each module path means. A fused path (`qkv_proj`,
`gate_up_proj`) means several targets at once, in the order of its output rows; the same A serves
all of them. Adapters name modules by the transformers library's paths.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.models.spec import ModelSpec

_SPLIT = {
    "self_attn.q_proj": ("q_proj",),
    "self_attn.k_proj": ("k_proj",),
    "self_attn.v_proj": ("v_proj",),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_proj": ("gate_proj",),
    "mlp.up_proj": ("up_proj",),
    "mlp.down_proj": ("down_proj",),
}
_FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}

#: Modules outside the layers that an adapter may name.
OUTER_MODULES = ("model.embed_tokens", "lm_head")


class Module(NamedTuple):
    """A linear module of a layer, and the targets whose rows its output holds, in order."""

    layer: int
    targets: tuple[str, ...]

    @property
    def is_fused(self) -> bool:
        return len(self.targets) > 1

    def shape(self, spec: ModelSpec) -> tuple[int, tuple[int, ...]]:
        """(d_in, d_out of each target) in this base model."""
        shapes = [spec.target_shape(self.layer, target) for target in self.targets]
        return shapes[0][0], tuple(d_out for _, d_out in shapes)


def layer_modules(num_layers: int) -> dict[str, Module]:
    """Path → module, split and fused, in layer order."""
    return {
        f"model.layers.{layer}.{suffix}": Module(layer, targets)
        for layer in range(num_layers)
        for suffix, targets in (_SPLIT | _FUSED).items()
    }
