"""Sizes of the part of a model that one device computes.

`app.engine.models.sharding` decides which columns a shard holds; everything here follows from it. Experts are divided
twice: each device has some of them (expert parallel), and some columns of these (tensor parallel). Everything else is
divided over all devices alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.errors import ConfigError
from app.engine.models.linear_modules import LATENT_B, LinearModule, absorbed_modules, stacked_modules
from app.engine.models.sharding import check_shards, shard_module
from app.engine.models.spec import AttentionSpec, ExpertsSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class XlaSizes:
    """A model divided over devices.

    whole: the linear modules of all layers, each once; modules: the same as one shard computes them; layers: by module,
    the layers that have it, which its arrays count. absorbed: the modules by head that replace the latent module; heads
    are divided over all devices.
    """

    spec: ModelSpec
    tensor_shards: int
    expert_shards: int
    whole: tuple[LinearModule, ...]
    modules: tuple[LinearModule, ...]
    layers: tuple[tuple[int, ...], ...]
    absorbed: tuple[LinearModule, ...] = ()

    @property
    def num_shards(self) -> int:
        """Number of devices."""
        return self.tensor_shards * self.expert_shards

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Any layer's attention: layers differ in rope, window and scale only."""
        return self.spec.layers[0].attention

    @property
    def mixture(self) -> ExpertsSpec:
        """The mixture of any layer that has experts."""
        return next(layer.experts for layer in self.spec.layers if layer.experts is not None)

    @property
    def kv_heads(self) -> int:
        """KV heads of one shard."""
        return self.module("qkv").groups[1]

    @property
    def vocab_per_shard(self) -> int:
        """Number of logits that a shard computes."""
        return -(-self.spec.vocab_size // self.num_shards)

    @property
    def single(self) -> tuple[LinearModule, ...]:
        """One shard's modules outside of experts."""
        return tuple(module for module in self.modules if module.num_experts is None)

    @property
    def experts_per_shard(self) -> int:
        """Experts of a layer per device; 0 for a model without."""
        counts = (module.num_experts for module in self.modules if module.num_experts is not None)
        return next(counts, 0) // self.expert_shards

    @property
    def with_weights(self) -> tuple[LinearModule, ...]:
        """One shard's modules that have weights of their own."""
        return (*(module for module in self.modules if module.kind is not LATENT_B), *self.absorbed)

    def group_size(self, module: LinearModule) -> int:
        """Experts of a layer, or latent heads, per device."""
        return self.attention.num_heads // self.num_shards if module in self.absorbed else self.experts_per_shard

    def module(self, name: str) -> LinearModule:
        """One shard's module by name."""
        return next(module for module in self.modules if module.name == name)

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers that have a module, in order; empty for an unknown name."""
        found = (layers for module, layers in zip(self.modules, self.layers, strict=True) if module.name == name)
        is_absorbed = any(module.name == name for module in self.absorbed)
        return tuple(range(self.num_layers)) if is_absorbed else next(found, ())

    def stacked_layer(self, name: str, layer: int) -> int:
        """A layer's index in the arrays of a module that it has."""
        return self.layers_of(name).index(layer)

    def shards_of(self, module: LinearModule) -> int:
        """Number of devices over which the module's columns are divided."""
        if module in self.absorbed:
            return 1
        return self.num_shards if module.num_experts is None else self.tensor_shards

    def total_width(self, module: LinearModule) -> int:
        """Columns over all shards for a module that is split on its output, else those of any shard."""
        return module.width() * (self.shards_of(module) if module.kind.split == "output" else 1)


def sizes_of(spec: ModelSpec, tensor_shards: int, expert_shards: int = 1) -> XlaSizes:
    """Raises CheckpointError if layers differ in more than a device can stack, ConfigError if it does not divide so."""
    stacked = stacked_modules(spec)
    whole = tuple(module for module, _ in stacked)
    counts = {module.num_experts for module in whole if module.num_experts is not None}
    if expert_shards > 1 and not counts:
        raise ConfigError(f"engine.xla.expert_parallel is {expert_shards} but {spec.name} has no experts; set 1")
    for count in counts:
        if count % expert_shards:
            raise ConfigError(
                f"engine.xla.expert_parallel {expert_shards} does not divide {spec.name}: layers have {count} experts; "
                "choose a divisor"
            )
    setting = "engine.xla.tensor_parallel" + (" times expert_parallel," if expert_shards > 1 else "")
    check_shards((one for one in whole if one.num_experts is None), tensor_shards * expert_shards, spec.name, setting)
    check_shards((one for one in whole if one.num_experts is not None), tensor_shards, spec.name)
    modules = tuple(
        shard_module(one, tensor_shards * (expert_shards if one.num_experts is None else 1)) for one in whole
    )
    layers = tuple(layers for _, layers in stacked)
    absorbed = absorbed_modules(spec.layers[0].attention)
    return XlaSizes(spec, tensor_shards, expert_shards, whole, modules, layers, absorbed)
