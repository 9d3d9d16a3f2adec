"""What tokens cost, from the configuration.

In: dollars per million tokens, by model or adapter. Out: whole billionths of a dollar, so that sums are exact. An
adapter without a price of its own costs what its base model does, and a model without any costs nothing. Rule: several
adapters at once are never cheaper than the dearest of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.config import PriceConfig
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import is_combination, parse_combination
from app.engine.request import Usage

#: A dollar per million tokens is so many nanos per token.
_NANOS = 1000


class Prices:
    """`base_name` is the base model's."""

    def __init__(self, prices: Mapping[str, PriceConfig], base_name: str) -> None:
        self._prices = prices
        self._base = prices.get(base_name, PriceConfig())

    def at_most(self, models: tuple[str, ...], num_prompt: int, max_tokens: int) -> int:
        """What a sequence may cost: nothing of it found in the cache, all of its tokens generated."""
        return self.of(models, Usage(num_prompt, 0, max_tokens))

    def of(self, models: tuple[str, ...], usage: Usage) -> int:
        """What a sequence has cost, in nanos. models: as `paid_models` has them."""
        if len(models) == 1 or models[0] in self._prices:
            return self._of(models[0], usage)
        return max(self._of(model, usage) for model in models[1:])

    def _of(self, model: str, usage: Usage) -> int:
        price = self._prices.get(model, self._base)
        uncached = usage.prompt_tokens - usage.cached_tokens
        return (
            uncached * round(price.input * _NANOS)
            + usage.cached_tokens * round(price.cached_input * _NANOS)
            + usage.completion_tokens * round(price.output * _NANOS)
        )


def paid_models(ref: AdapterRef | None, base_name: str) -> tuple[str, ...]:
    """The names that a request with this adapter is limited and paid by: its own, and those of what it is made of."""
    if ref is None:
        return (base_name,)
    if not is_combination(ref.uri):
        return (ref.name,)
    return (ref.name, *(name for part in parse_combination(ref.uri).parts for name in paid_models(part.ref, base_name)))
