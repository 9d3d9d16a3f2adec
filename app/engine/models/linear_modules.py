"""The linear modules of each layer: the one table from which every device's memory layout follows.

A linear module multiplies one input by the weights of all targets that read it (q, k and v; gate and up), so a device
reads the input once and launches once. Packed weights, LoRA tables, what an adapter may change, and shards are derived
from these tuples; no other code knows which targets exist, how they are fused, or where one begins in a module's
columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from app.engine.errors import CheckpointError
from app.engine.models.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec, StoredModule


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """What is true of a linear module whatever the model's sizes.

    targets: the LoRA targets it computes side by side, in the order of its columns. block: where a checkpoint keeps
    them in a layer. split: the axis that tensor parallelism divides; a module that is split on its input adds its sums
    over the shards. fused: the name under which checkpoints and adapters may save all targets as one, outputs
    concatenated, or None.
    """

    name: str
    block: str
    targets: tuple[str, ...]
    split: Literal["output", "input"]
    fused: str | None = None

    def path(self, target: str, expert: int | None = None) -> str:
        """A target's name within its layer: "self_attn.q_proj", for an expert "mlp.experts.3.down_proj"."""
        if expert is None:
            return f"{self.block}.{target}" if self.block else target
        group, _, name = target.partition(".")
        return f"{self.block}.{group}.{expert}.{name}"


ATTENTION = (
    ModuleKind("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), "output", fused="qkv_proj"),
    ModuleKind("o", "self_attn", ("o_proj",), "input"),
)
GATED_MLP = (
    ModuleKind("gate_up", "mlp", ("gate_proj", "up_proj"), "output", fused="gate_up_proj"),
    ModuleKind("down", "mlp", ("down_proj",), "input"),
)
#: Multi-head latent attention: queries directly, or through a latent; the latent of keys and values with the rotated
#: part of keys, and keys and values from it.
LATENT_QUERY = ModuleKind("query", "self_attn", ("q_proj",), "output")
LATENT_QUERY_A = ModuleKind("query_a", "self_attn", ("q_a_proj",), "output")
LATENT_QUERY_B = ModuleKind("query_b", "self_attn", ("q_b_proj",), "output")
LATENT_A = ModuleKind("latent_a", "self_attn", ("kv_a_proj_with_mqa",), "output")
LATENT_B = ModuleKind("latent_b", "self_attn", ("kv_b_proj",), "output")
LATENT_KEYS = ModuleKind("latent_keys", "self_attn", ("kv_b_proj.keys",), "output")
LATENT_VALUES = ModuleKind("latent_values", "self_attn", ("kv_b_proj.values",), "output")
#: An encoder's layer. Three modules are called "dense", so targets are their full names in the layer.
ENCODER = (
    ModuleKind("qkv", "attention.self", ("query", "key", "value"), "output"),
    ModuleKind("o", "", ("attention.output.dense",), "input"),
    ModuleKind("up", "", ("intermediate.dense",), "output"),
    ModuleKind("down", "", ("output.dense",), "input"),
)
#: Names of routers' modules, which depend on the family.
ROUTERS = ("gate", "router")
EXPERTS = (
    ModuleKind(
        "experts_gate_up", "mlp", ("experts.gate_proj", "experts.up_proj"), "output", fused="experts.gate_up_proj"
    ),
    ModuleKind("experts_down", "mlp", ("experts.down_proj",), "input"),
)
#: A decoder layer without experts: what module names mean when the model is unknown.
DENSE = (*ATTENTION, *GATED_MLP)
DENSE_TARGETS = tuple(target for kind in DENSE for target in kind.targets)
ENCODER_TARGETS = tuple(target for kind in ENCODER for target in kind.targets)


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A linear module of one layer, with its sizes.

    widths: outputs of each target. groups: per target, the number of indivisible equal parts (heads, or single columns)
    of the axis that shards divide. has_bias: the base's. num_experts: how many such weights the layer has, of which a
    token uses a few; None for a single one that every token uses.
    """

    kind: ModuleKind
    d_in: int
    widths: tuple[int, ...]
    groups: tuple[int, ...]
    has_bias: bool
    num_experts: int | None = None

    @property
    def experts(self) -> tuple[int | None, ...]:
        """Possible values of `LoraKey.expert`: each expert, or None alone."""
        return (None,) if self.num_experts is None else tuple(range(self.num_experts))

    @property
    def has_rank_rows(self) -> bool:
        """Whether deltas lie in the LoRA tables that all adapters share; those of experts and MLA heads do not."""
        return self.num_experts is None and self.kind is not LATENT_B

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def targets(self) -> tuple[str, ...]:
        return self.kind.targets

    def starts(self, multiple: int = 1) -> tuple[int, ...]:
        """The first column of each target, if each target is padded to a `multiple` of columns."""
        return tuple(accumulate(self.padded_widths(multiple)[:-1], initial=0))

    def padded_widths(self, multiple: int) -> tuple[int, ...]:
        """Columns of each target, rounded up to a `multiple`."""
        return tuple(-(-width // multiple) * multiple for width in self.widths)

    def width(self, multiple: int = 1) -> int:
        """Columns of all targets, each rounded up to a `multiple`."""
        return sum(self.padded_widths(multiple))

    @property
    def row_size(self) -> int:
        """Numbers of one rank row over all targets: a row of a and a row of b."""
        return len(self.targets) * self.d_in + self.width()

    def columns(self, target: str, multiple: int = 1) -> slice:
        """A target's columns, without padding; ValueError for a target of another module."""
        index = self.targets.index(target)
        start = self.starts(multiple)[index]
        return slice(start, start + self.widths[index])


def layer_linear_modules(spec: ModelSpec, layer: int) -> tuple[LinearModule, ...]:
    """The linear modules of one layer, in the order they are computed."""
    if spec.encoder is not None:
        return _encoder_modules(spec, layer)
    if spec.layers[layer].stored:
        return _stored_modules(spec.layers[layer].stored)
    attention = spec.layers[layer].attention
    hidden = spec.hidden_size
    if attention.latent is not None:
        return (
            *_latent_modules(hidden, attention, attention.latent),
            *_feed_forward_modules(hidden, spec.layers[layer]),
        )
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    q, kv = heads * attention.head_dim, kv_heads * attention.head_dim
    qkv, o = ATTENTION
    return (
        LinearModule(qkv, hidden, (q, kv, kv), (heads, kv_heads, kv_heads), attention.qkv_bias),
        LinearModule(o, q, (hidden,), (heads,), attention.o_bias),
        *_feed_forward_modules(hidden, spec.layers[layer]),
    )


def _latent_modules(hidden: int, attention: AttentionSpec, latent: LatentSpec) -> tuple[LinearModule, ...]:
    heads, has_bias = attention.num_heads, attention.qkv_bias
    q, kv, values = heads * attention.head_dim, heads * (latent.key_size + latent.value_size), heads * latent.value_size
    rank = latent.query_rank
    queries: tuple[LinearModule, ...] = (LinearModule(LATENT_QUERY, hidden, (q,), (heads,), has_bias=False),)
    if rank is not None:
        queries = (
            LinearModule(LATENT_QUERY_A, hidden, (rank,), (1,), has_bias),
            LinearModule(LATENT_QUERY_B, rank, (q,), (heads,), has_bias=False),
        )
    return (
        *queries,
        LinearModule(LATENT_A, hidden, (latent.width,), (1,), has_bias),
        LinearModule(LATENT_B, latent.kv_rank, (kv,), (heads,), has_bias=False),
        LinearModule(ATTENTION[1], values, (hidden,), (heads,), attention.o_bias),
    )


def absorbed_modules(attention: AttentionSpec) -> tuple[LinearModule, ...]:
    """The modules that replace `kv_b_proj` on a device that attends to latents directly; () without MLA.

    Each head is an "expert" that every token uses. Keys: a query [key_size] to a latent [kv_rank], with the head's rows
    of the weight from the left; values: the weighted sum of latents [kv_rank] to a value [value_size], with its other
    rows.
    """
    latent = attention.latent
    if latent is None:
        return ()
    heads = attention.num_heads
    return (
        LinearModule(LATENT_KEYS, latent.key_size, (latent.kv_rank,), (1,), has_bias=False, num_experts=heads),
        LinearModule(LATENT_VALUES, latent.kv_rank, (latent.value_size,), (1,), has_bias=False, num_experts=heads),
    )


def _feed_forward_modules(hidden: int, layer: LayerSpec) -> tuple[LinearModule, ...]:
    mixture = layer.experts
    if mixture is None:
        return _gated_modules(GATED_MLP, hidden, layer.mlp)
    count, shared = mixture.router.num_experts, mixture.shared
    experts = tuple(replace(module, num_experts=count) for module in _gated_modules(EXPERTS, hidden, layer.mlp))
    router = router_kind(mixture.router.name)
    modules = (LinearModule(router, hidden, (count,), (1,), mixture.router.has_bias), *experts)
    if shared is None:
        return modules
    gate, *kinds = shared_kinds(shared.name)
    gates = (LinearModule(gate, hidden, (1,), (1,), has_bias=False),) if shared.is_gated else ()
    return (*modules, *gates, *_gated_modules(kinds, hidden, shared.mlp))


def router_kind(name: str) -> ModuleKind:
    """The kind of a router with this module name within "mlp"."""
    return ModuleKind("router", "mlp", (name,), "output")


def shared_kinds(name: str) -> tuple[ModuleKind, ModuleKind, ModuleKind]:
    """The kinds of a shared expert with this module name within "mlp": its gate, if any, and its feed-forward."""
    return (
        ModuleKind("shared_gate", "mlp", (f"{name}_gate",), "output"),
        ModuleKind("shared_gate_up", "mlp", (f"{name}.gate_proj", f"{name}.up_proj"), "output"),
        ModuleKind("shared_down", "mlp", (f"{name}.down_proj",), "input"),
    )


def _gated_modules(kinds: Sequence[ModuleKind], hidden: int, mlp: MlpSpec) -> tuple[LinearModule, LinearModule]:
    (gate_up, down), wide = kinds, mlp.intermediate_size
    return (
        LinearModule(gate_up, hidden, (wide, wide), (wide, wide), mlp.bias),
        LinearModule(down, wide, (hidden,), (wide,), mlp.bias),
    )


def _encoder_modules(spec: ModelSpec, layer: int) -> tuple[LinearModule, ...]:
    hidden, wide = spec.hidden_size, spec.layers[layer].mlp.intermediate_size
    heads = spec.layers[layer].attention.num_heads
    qkv, o, up, down = ENCODER
    return (
        LinearModule(qkv, hidden, (hidden,) * 3, (heads,) * 3, has_bias=True),
        LinearModule(o, hidden, (hidden,), (heads,), has_bias=True),
        LinearModule(up, hidden, (wide,), (wide,), has_bias=True),
        LinearModule(down, wide, (hidden,), (wide,), has_bias=True),
    )


def _stored_modules(stored: Sequence[StoredModule]) -> tuple[LinearModule, ...]:
    """The modules of a decoder layer as far as they are those, then each other one under its path in the layer."""
    sizes = {module.path: module for module in stored}
    found = []
    for kind in DENSE:
        parts = [sizes[path] for path in map(kind.path, kind.targets) if path in sizes]
        if len(parts) == len(kind.targets) and len({part.d_in for part in parts}) == 1:
            widths = tuple(part.d_out for part in parts)
            found.append(LinearModule(kind, parts[0].d_in, widths, (1,) * len(parts), has_bias=False))
            for part in parts:
                del sizes[part.path]
    others = (
        LinearModule(ModuleKind(path, "", (path,), "output"), d_in, (d_out,), (1,), has_bias=False)
        for path, d_in, d_out in sizes.values()
    )
    return (*found, *others)


class StackedModule(NamedTuple):
    """A linear module and the layers that have it, in order."""

    module: LinearModule
    layers: tuple[int, ...]


def stacked_modules(spec: ModelSpec) -> tuple[StackedModule, ...]:
    """Each linear module once, for devices that stack layers; layers may differ in their feed-forward.

    CheckpointError if layers differ in attention beyond rope, window and scale, or in a module's sizes.
    """
    found: dict[str, tuple[LinearModule, list[int]]] = {}
    for layer in range(len(spec.layers)):
        _check_alike(spec, layer)
        for module in layer_linear_modules(spec, layer):
            first, layers = found.setdefault(module.name, (module, []))
            if module != first:
                raise CheckpointError(
                    f"layer {layer} of {spec.name} differs from layer {layers[0]} in the sizes of {module.name}; "
                    "a model whose layers differ so is not served"
                )
            layers.append(layer)
    return tuple(StackedModule(module, tuple(layers)) for module, layers in found.values())


def shared_table_modules(stacked: Iterable[StackedModule]) -> tuple[LinearModule, ...]:
    """The linear modules stored in the shared LoRA tables."""
    return tuple(module for module, _ in stacked if module.has_rank_rows)


def paged_modules(spec: ModelSpec) -> tuple[StackedModule, ...]:
    """The linear modules whose deltas lie in memory of their own: experts', then MLA's by head."""
    mixed = tuple(one for one in stacked_modules(spec) if one.module.num_experts is not None)
    every = tuple(range(len(spec.layers)))
    return (*mixed, *(StackedModule(module, every) for module in absorbed_modules(spec.layers[0].attention)))


def _check_alike(spec: ModelSpec, layer: int) -> None:
    """CheckpointError if a layer differs from the first one in activation, norms or attention; rope, window and scale
    may differ.
    """
    first, other = spec.layers[0], spec.layers[layer]
    own = first.attention
    attention = replace(other.attention, rope=own.rope, window=own.window, scale=own.scale)
    if attention != own or other.mlp.activation != first.mlp.activation or other.post_norms != first.post_norms:
        raise CheckpointError(
            f"layer {layer} of {spec.name} differs from layer 0 in sizes, biases, norms or activation; "
            "a model whose layers differ in more than rope, window and attention scale is not served"
        )


def targets_of(modules: Iterable[LinearModule]) -> tuple[str, ...]:
    """Every target of these modules, in order: the index of a target in tables that number targets."""
    return tuple(target for module in modules for target in module.targets)


def linear_module_of(modules: Iterable[LinearModule], target: str) -> LinearModule:
    """The linear module that computes a target; KeyError if none does."""
    for module in modules:
        if target in module.targets:
            return module
    raise KeyError(target)


def target_shape(spec: ModelSpec, layer: int, target: str) -> tuple[int, int]:
    """(d_in, d_out) of one target of a layer; KeyError if there is none."""
    module = linear_module_of(layer_linear_modules(spec, layer), target)
    return module.d_in, module.widths[module.targets.index(target)]
