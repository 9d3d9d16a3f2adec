"""Token prices from the configuration.

Dollars per million tokens become whole billionths of a dollar, so sums are exact. An adapter without its own price
costs what the base model does; a model without any price is free. A combination costs the maximum of its own price and
its parts'. Prices go by `model_id`, so no project gets another's price by choosing its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.config import PriceConfig
from app.deployments.registry.models import model_id
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import is_combination, parse_combination
from app.engine.request import Usage

#: Nanos per token for one dollar per million tokens.
_NANOS = 1000


class Prices:
    """Prices by `model_id`; `base_name` is the base model's."""

    def __init__(self, prices: Mapping[str, PriceConfig], base_name: str) -> None:
        self._prices = prices
        self._base = prices.get(base_name, PriceConfig())

    def at_most(self, models: tuple[str, ...], num_prompt: int, max_tokens: int) -> int:
        """Upper bound of a sequence's cost: nothing cached, all tokens generated."""
        return self.of(models, Usage(num_prompt, 0, max_tokens))

    def of(self, models: tuple[str, ...], usage: Usage) -> int:
        """Cost of a sequence in nanos. models: as returned by `paid_models`."""
        return max(self._of(model, usage) for model in models)

    def _of(self, model: str, usage: Usage) -> int:
        price = self._prices.get(model, self._base)
        uncached = usage.prompt_tokens - usage.cached_tokens
        return (
            uncached * round(price.input * _NANOS)
            + usage.cached_tokens * round(price.cached_input * _NANOS)
            + usage.completion_tokens * round(price.output * _NANOS)
        )


def paid_models(ref: AdapterRef | None, base_name: str) -> tuple[str, ...]:
    """The model ids that a request with this adapter is limited and billed by: its own, and those of its parts."""
    if ref is None:
        return (base_name,)
    own = model_id(ref.tenant_id, ref.name)
    if not is_combination(ref.uri):
        return (own,)
    return (own, *(name for part in parse_combination(ref.uri).parts for name in paid_models(part.ref, base_name)))
