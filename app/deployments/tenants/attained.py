"""What each tenant was served lately, in the process that owns the ledger: all of them, so that few can be told.

In: batches as they enter the ledger. Out: tokens per second of the tenants that were served most, of all the others
together, and how evenly all of them were served. Rule: however many tenants there are, at most so many are named; what
is not named is in `OTHER`, so that the sum is always everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from app.deployments.tenants.metering import Charge, Row
from app.deployments.tenants.recent import WINDOW_S, RecentSums

#: Tenants that are named.
MAX_NAMED = 32
OTHER = "other"
#: As the fair queue of engines prices tokens: those of prompts that were not cached, and generated ones.
_INPUT_PRICE, _OUTPUT_PRICE = 1.0, 2.0


class Served(NamedTuple):
    """One tenant's part: tokens per second, and loads of adapters per second."""

    prompt: float
    cached: float
    completion: float
    loads: float


class Attained:
    """One event loop. `clock` gives seconds and never goes back; `weight` says a tenant's share."""

    def __init__(self, weight: Callable[[str], float], clock: Callable[[], float]) -> None:
        self._weight = weight
        self._recent: RecentSums[str, Charge] = RecentSums(clock, Charge.plus)

    def add(self, rows: Iterable[Row]) -> None:
        """A batch is new in the ledger."""
        for key, charge in rows:
            self._recent.add(key.project_id, charge)

    def served(self) -> Mapping[str, Served]:
        """By tenant: those that were served most, and the others together."""
        sums = self._recent.sums()
        largest = sorted(sums, key=lambda tenant_id: (-_service(sums[tenant_id]), tenant_id))
        told = {tenant_id: _per_second(sums[tenant_id]) for tenant_id in largest[:MAX_NAMED]}
        rest = Charge()
        for tenant_id in largest[MAX_NAMED:]:
            rest = rest.plus(sums[tenant_id])
        return told | ({OTHER: _per_second(rest)} if largest[MAX_NAMED:] else {})

    def jain_index(self) -> float:
        """1 if all tenants that were served got service by their weights, 1/n if one of n got all of it (Jain 1984)."""
        services = [_service(charge) / self._weight(tenant_id) for tenant_id, charge in self._recent.sums().items()]
        return jain_index([service for service in services if service])


def jain_index(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2); 1 of nothing."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def priced(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
    """Tokens by what they cost to compute, in tokens of prompts."""
    return _INPUT_PRICE * (prompt_tokens - cached_tokens) + _OUTPUT_PRICE * completion_tokens


def _service(charge: Charge) -> float:
    return priced(charge.prompt_tokens, charge.cached_tokens, charge.completion_tokens)


def _per_second(charge: Charge) -> Served:
    parts = (charge.prompt_tokens, charge.cached_tokens, charge.completion_tokens, charge.num_loads)
    return Served(*(part / WINDOW_S for part in parts))
