"""Names of a base model's modules, as adapters spell them.

In: a `ModelSpec`. Out: which (layer, targets) each module path means. A fused path (`qkv_proj`,
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


class ModuleSlices(NamedTuple):
    """The targets of a module, with one output width per target."""

    layer: int
    targets: tuple[str, ...]
    d_in: int
    d_outs: tuple[int, ...]

    @property
    def is_fused(self) -> bool:
        return len(self.targets) > 1


def module_table(spec: ModelSpec) -> dict[str, ModuleSlices]:
    """Every path of a decoder layer's linear module, split and fused, in layer order."""
    table: dict[str, ModuleSlices] = {}
    for layer in range(len(spec.layers)):
        for suffix, targets in (_SPLIT | _FUSED).items():
            shapes = [spec.target_shape(layer, target) for target in targets]
            d_outs = tuple(d_out for _, d_out in shapes)
            table[f"model.layers.{layer}.{suffix}"] = ModuleSlices(layer, targets, shapes[0][0], d_outs)
    return table
