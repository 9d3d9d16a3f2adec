"""What the memory costs that requests held: rank rows and KV blocks, by the GiB and hour.

In: sums of the ledger, prices from the configuration, the sizes of a row and a block. Out: lines of costs. Rule: all
amounts are whole numbers of one unit until they are told, so that lines of any grouping add up to the engines' sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from app.config import AppConfig, PriceConfig
from app.deployments.tenants.metering import Charge
from app.engine.config import CudaConfig
from app.engine.models.footprint import kv_block_bytes, rank_row_bytes
from app.engine.models.spec import ModelSpec

#: Bytes times milliseconds of a GiB held for an hour.
GIBIBYTE_HOUR = (1 << 30) * 3_600_000
#: What follows a model's name in the names of these lines. No name of an adapter has a space.
RANK_ROWS, KV_BLOCKS = ", rank rows", ", KV blocks"


class Sizes(NamedTuple):
    """Bytes of one rank row in all layers, and of one KV block."""

    rank_row: int
    kv_block: int


class MemoryLine(NamedTuple):
    """`byte_ms`: what was held. `cost`: in nanos / GIBIBYTE_HOUR."""

    name: str
    byte_ms: int
    cost: int


class MemoryPrices:
    """`base_name` is the base model's, whose prices hold where an adapter has none of its own."""

    def __init__(self, prices: Mapping[str, PriceConfig], base_name: str, sizes: Sizes) -> None:
        self._prices = prices
        self._base = prices.get(base_name, PriceConfig())
        self._sizes = sizes

    def lines(self, model: str, charge: Charge) -> list[MemoryLine]:
        """Of what has a price and was held. `model`: as the ledger has it."""
        price = self._prices.get(model, self._base)
        held = (
            (RANK_ROWS, charge.rank_row_ms * self._sizes.rank_row, price.rank_rows),
            (KV_BLOCKS, charge.kv_block_ms * self._sizes.kv_block, price.kv_blocks),
        )
        return [
            MemoryLine(model + words, byte_ms, byte_ms * round(dollars * 1e9))
            for words, byte_ms, dollars in held
            if byte_ms and dollars
        ]


def model_of(line_item: str) -> str:
    """Whose line it is."""
    return line_item.removesuffix(RANK_ROWS).removesuffix(KV_BLOCKS)


def sizes_of(spec: ModelSpec, config: AppConfig) -> Sizes:
    """As the model and the type of its numbers say, without what a device aligns."""
    is_half = config.engine.cuda is not None and config.engine.section(CudaConfig).dtype == "bfloat16"
    element_bytes = 2 if is_half else 4
    num_bytes = 0 if spec.encoder else kv_block_bytes(spec, config.engine.block_size, element_bytes)
    return Sizes(rank_row_bytes(spec, element_bytes), num_bytes)
