"""What tokens cost, from the configuration.

In: dollars per million tokens, by model or adapter. Out: whole billionths of a dollar, so that sums are exact. An
adapter without a price of its own costs what its base model does, and a model without any costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.config import PriceConfig
from app.engine.request import Usage

#: A dollar per million tokens is so many nanos per token.
_NANOS = 1000


class Prices:
    """`base_name` is the base model's."""

    def __init__(self, prices: Mapping[str, PriceConfig], base_name: str) -> None:
        self._prices = prices
        self._base = prices.get(base_name, PriceConfig())

    def at_most(self, model: str, num_prompt: int, max_tokens: int) -> int:
        """What a sequence may cost: nothing of it found in the cache, all of its tokens generated."""
        return self.of(model, Usage(num_prompt, 0, max_tokens))

    def of(self, model: str, usage: Usage) -> int:
        """What a sequence has cost, in nanos."""
        price = self._prices.get(model, self._base)
        uncached = usage.prompt_tokens - usage.cached_tokens
        return (
            uncached * round(price.input * _NANOS)
            + usage.cached_tokens * round(price.cached_input * _NANOS)
            + usage.completion_tokens * round(price.output * _NANOS)
        )
