"""Which linear products a layer computes: the one table that every device's layouts follow from.

In: a `ModelSpec`. Out: a tuple of `Product`s per layer, in the order they are computed. A product multiplies one input
by the weights of all modules that read it (q, k and v; gate and up), so a device reads the input once and launches
once. Packed weights, rank-row tables, what an adapter may change, and shards are derived from these tuples; no other
module knows which targets there are, how many products they make, or where one begins in another's columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from app.engine.errors import CheckpointError
from app.engine.models.spec import ModelSpec

#: A layer's activations that products read: the normalised hidden states, attention's output, the feed-forward with a
#: gate and without.
Activation = Literal["normed", "attended", "gated", "activated"]


@dataclass(frozen=True, slots=True)
class ProductKind:
    """What is true of a product whatever the model's sizes.

    targets: the modules it computes side by side, by the names that LoRA adapters use, in the order of its columns.
    block: where a checkpoint keeps them in a layer. split: the axis that tensor-parallel shards divide; the sums of a
    product that is split on its input are added over the shards. fused: the name of a module that checkpoints and
    adapters may save in place of all targets, with their outputs one after the other, or None.
    """

    name: str
    block: str
    targets: tuple[str, ...]
    reads: Activation
    split: Literal["output", "input"]
    fused: str | None = None

    def path(self, target: str) -> str:
        """A target's name within its layer: "self_attn.q_proj"."""
        return f"{self.block}.{target}" if self.block else target


ATTENTION = (
    ProductKind("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), "normed", "output", fused="qkv_proj"),
    ProductKind("o", "self_attn", ("o_proj",), "attended", "input"),
)
GATED_MLP = (
    ProductKind("gate_up", "mlp", ("gate_proj", "up_proj"), "normed", "output", fused="gate_up_proj"),
    ProductKind("down", "mlp", ("down_proj",), "gated", "input"),
)
#: Of an encoder's layer. Three modules are called "dense": here they go by their whole names in the layer.
ENCODER = (
    ProductKind("qkv", "attention.self", ("query", "key", "value"), "normed", "output"),
    ProductKind("o", "", ("attention.output.dense",), "attended", "input"),
    ProductKind("up", "", ("intermediate.dense",), "normed", "output"),
    ProductKind("down", "", ("output.dense",), "activated", "input"),
)
#: Of a decoder layer without experts: what a module's name means where no model is at hand.
DENSE = (*ATTENTION, *GATED_MLP)
DENSE_TARGETS = tuple(target for kind in DENSE for target in kind.targets)
ENCODER_TARGETS = tuple(target for kind in ENCODER for target in kind.targets)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of one layer with its sizes.

    widths: outputs of each target. groups: per target, into how many equal parts (heads, or single columns) the axis
    falls that shards divide; a part is never divided. has_bias: whether the base adds one.
    """

    kind: ProductKind
    d_in: int
    widths: tuple[int, ...]
    groups: tuple[int, ...]
    has_bias: bool

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def targets(self) -> tuple[str, ...]:
        return self.kind.targets

    def starts(self, multiple: int = 1) -> tuple[int, ...]:
        """The first column of each target, where each target is rounded up to a `multiple` of columns."""
        return tuple(accumulate(self.padded_widths(multiple)[:-1], initial=0))

    def padded_widths(self, multiple: int) -> tuple[int, ...]:
        """Columns of each target, rounded up to a `multiple`."""
        return tuple(-(-width // multiple) * multiple for width in self.widths)

    def width(self, multiple: int = 1) -> int:
        """Columns of all targets, each rounded up to a `multiple`."""
        return sum(self.padded_widths(multiple))

    @property
    def row_size(self) -> int:
        """Numbers of one rank row of every target: a row of a, and one of b."""
        return len(self.targets) * self.d_in + self.width()

    def columns(self, target: str, multiple: int = 1) -> slice:
        """A target's own columns, without what rounding adds; ValueError for a target of another product."""
        index = self.targets.index(target)
        start = self.starts(multiple)[index]
        return slice(start, start + self.widths[index])


def layer_products(spec: ModelSpec, layer: int) -> tuple[Product, ...]:
    """The products of one layer, in the order they are computed."""
    if spec.encoder is not None:
        return _encoder_products(spec, layer)
    attention, mlp = spec.layers[layer].attention, spec.layers[layer].mlp
    hidden, wide = spec.hidden_size, mlp.intermediate_size
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    q, kv = heads * attention.head_dim, kv_heads * attention.head_dim
    qkv, o = ATTENTION
    gate_up, down = GATED_MLP
    return (
        Product(qkv, hidden, (q, kv, kv), (heads, kv_heads, kv_heads), attention.qkv_bias),
        Product(o, q, (hidden,), (heads,), attention.o_bias),
        Product(gate_up, hidden, (wide, wide), (wide, wide), mlp.bias),
        Product(down, wide, (hidden,), (wide,), mlp.bias),
    )


def _encoder_products(spec: ModelSpec, layer: int) -> tuple[Product, ...]:
    hidden, wide = spec.hidden_size, spec.layers[layer].mlp.intermediate_size
    heads = spec.layers[layer].attention.num_heads
    qkv, o, up, down = ENCODER
    return (
        Product(qkv, hidden, (hidden,) * 3, (heads,) * 3, has_bias=True),
        Product(o, hidden, (hidden,), (heads,), has_bias=True),
        Product(up, hidden, (wide,), (wide,), has_bias=True),
        Product(down, wide, (hidden,), (wide,), has_bias=True),
    )


def uniform_products(spec: ModelSpec) -> tuple[Product, ...]:
    """The products of any layer; CheckpointError where layers differ in more than rope, window and attention scale.

    Devices stack layers in one array and keep an adapter's rank rows at one place in all of them.
    """
    first = spec.layers[0]
    for index, layer in enumerate(spec.layers):
        attention = replace(
            layer.attention, rope=first.attention.rope, window=first.attention.window, scale=first.attention.scale
        )
        if replace(layer, attention=attention) != first:
            raise CheckpointError(
                f"layer {index} of {spec.name} differs from layer 0 in sizes, biases, norms or activation; "
                "a model whose layers differ in more than rope, window and attention scale is not served"
            )
    return layer_products(spec, 0)


def targets_of(products: Iterable[Product]) -> tuple[str, ...]:
    """Every target of these products, in their order: a target's place in tables that count targets one by one."""
    return tuple(target for product in products for target in product.targets)


def product_of(products: Iterable[Product], target: str) -> Product:
    """The product that computes a target; KeyError if none does."""
    for product in products:
        if target in product.targets:
            return product
    raise KeyError(target)


def target_shape(spec: ModelSpec, layer: int, target: str) -> tuple[int, int]:
    """(d_in, d_out) of one target of a layer; KeyError if there is none."""
    product = product_of(layer_products(spec, layer), target)
    return product.d_in, product.widths[product.targets.index(target)]
