"""The size of a device's adapter tables, which decides the adapters that can never be held there.

`adapter_pool` decides whether an adapter has room now.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.errors import AdapterTooLarge


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Sizes of one device's tables. `max_rank`: the largest rank that fits empty tables."""

    num_rows: int
    rank_alignment: int
    max_loras: int
    max_extra_bytes: int
    max_rank: int

    def check_extras(self, name: str, extra_bytes: int) -> None:
        """Raise AdapterTooLarge if extra weights of this size can never be held."""
        if extra_bytes > self.max_extra_bytes:
            raise AdapterTooLarge(
                f"adapter {name!r} has {extra_bytes} bytes of extra weights (DoRA, biases, norms, whole modules "
                f"or token rows) but this engine holds at most {self.max_extra_bytes}; raise "
                "engine.extra_weights_bytes or train fewer whole modules"
            )

    def check_rows(self, name: str, num_needed: int) -> None:
        """Raise AdapterTooLarge if an adapter with so many rank rows can never be held."""
        if num_needed > self.max_rank:
            raise AdapterTooLarge(
                f"adapter {name!r} needs {num_needed} rank rows but this model's pool gives it at most {self.max_rank} "
                f"({self.num_rows} rank rows, {self.max_loras - 1} adapter slots "
                "besides the base); raise engine.lora_pool_rows or register an adapter of lower rank"
            )
