"""What one tensor-parallel shard of a model computes.

In: a `ModelSpec`, a number of shards, and to what a form rounds columns. Out: `XlaSizes`. Which columns a shard holds
is said by `app.engine.models.sharding`; everything here follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.models.products import Product, uniform_products
from app.engine.models.sharding import check_shards, shard_product
from app.engine.models.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class XlaSizes:
    """whole: the products of any layer; products: the same as one shard computes them.

    column_multiple: what the columns of each target, and the logits of a shard, are rounded up to.
    """

    spec: ModelSpec
    num_shards: int
    column_multiple: int
    whole: tuple[Product, ...]
    products: tuple[Product, ...]

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Any layer's: they differ in rope, window and scale only."""
        return self.spec.layers[0].attention

    @property
    def kv_heads(self) -> int:
        """KV heads of one shard."""
        return self.product("qkv").groups[1]

    @property
    def vocab_per_shard(self) -> int:
        """Logits that a shard computes."""
        per_shard = -(-self.spec.vocab_size // self.num_shards)
        return -(-per_shard // self.column_multiple) * self.column_multiple

    def product(self, name: str) -> Product:
        """One shard's, by name."""
        return next(product for product in self.products if product.name == name)

    def width(self, product: Product) -> int:
        """Columns that one shard computes for a product."""
        return product.width(self.column_multiple)

    def total_width(self, product: Product) -> int:
        """Columns of all shards of a product that is split on its output; else those of any shard."""
        return self.width(product) * (self.num_shards if product.kind.split == "output" else 1)


def sizes_of(spec: ModelSpec, num_shards: int, column_multiple: int) -> XlaSizes:
    """CheckpointError for layers of unequal size; ConfigError if the model does not divide by `num_shards`."""
    whole = uniform_products(spec)
    check_shards(whole, num_shards, spec.name)
    products = tuple(shard_product(product, num_shards) for product in whole)
    return XlaSizes(spec, num_shards, column_multiple, whole, products)
