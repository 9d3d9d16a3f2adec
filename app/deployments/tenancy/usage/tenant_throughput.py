"""What each tenant was served lately, in the process that owns the ledger: all of them, so that few can be told.

In: batches as they enter the ledger. Out: tokens per second of the tenants that were served most, of all the others
together, and how evenly all of them were served. Rule: however many tenants there are, at most so many are named; what
is not named is in `OTHER`, so that the sum is always everybody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from app.deployments.tenancy.usage.flusher import Row, UsageRecord

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Over so long a time it is looked, in steps of so long.
WINDOW_S, STEP_S = 60.0, 5.0
#: Tenants that are named.
MAX_NAMED = 32
OTHER = "other"
#: As the fair queue of engines prices tokens: those of prompts that were not cached, and generated ones.
_INPUT_PRICE, _OUTPUT_PRICE = 1.0, 2.0


class ServedTokens(NamedTuple):
    """One tenant's part: tokens per second, and loads of adapters per second."""

    prompt: float
    cached: float
    completion: float
    loads: float


class SlidingSums(Generic[K, V]):
    """Sums per key over the last minute; a key without amounts in it is forgotten.

    One thread at a time. `clock` gives seconds and never goes back; `plus` adds two amounts.
    """

    def __init__(self, clock: Callable[[], float], plus: Callable[[V, V], V]) -> None:
        self._clock = clock
        self._plus = plus
        self._steps: deque[tuple[float, dict[K, V]]] = deque()

    def add(self, key: K, amount: V) -> None:
        now_s = self._clock()
        self._forget(now_s)
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, {}))
        self._add(self._steps[-1][1], key, amount)

    def sums(self) -> Mapping[K, V]:
        """Of the keys that something came for in the last minute."""
        self._forget(self._clock())
        sums: dict[K, V] = {}
        for _, step in self._steps:
            for key, amount in step.items():
                self._add(sums, key, amount)
        return sums

    def _add(self, sums: dict[K, V], key: K, amount: V) -> None:
        sums[key] = self._plus(sums[key], amount) if key in sums else amount

    def _forget(self, now_s: float) -> None:
        while self._steps and now_s - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()


class TenantThroughput:
    """One event loop. `clock` gives seconds and never goes back; `weight` says a tenant's share."""

    def __init__(self, weight: Callable[[str], float], clock: Callable[[], float]) -> None:
        self._weight = weight
        self._recent: SlidingSums[str, UsageRecord] = SlidingSums(clock, UsageRecord.plus)

    def add(self, rows: Iterable[Row]) -> None:
        """A batch is new in the ledger."""
        for key, charge in rows:
            self._recent.add(key.project_id, charge)

    def served(self) -> Mapping[str, ServedTokens]:
        """By tenant: those that were served most, and the others together."""
        sums = self._recent.sums()
        largest = sorted(sums, key=lambda tenant_id: (-_service(sums[tenant_id]), tenant_id))
        told = {tenant_id: _per_second(sums[tenant_id]) for tenant_id in largest[:MAX_NAMED]}
        rest = UsageRecord()
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


def weighted_tokens(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
    """Tokens by what they cost to compute, in tokens of prompts."""
    return _INPUT_PRICE * (prompt_tokens - cached_tokens) + _OUTPUT_PRICE * completion_tokens


def _service(charge: UsageRecord) -> float:
    return weighted_tokens(charge.prompt_tokens, charge.cached_tokens, charge.completion_tokens)


def _per_second(charge: UsageRecord) -> ServedTokens:
    parts = (charge.prompt_tokens, charge.cached_tokens, charge.completion_tokens, charge.num_loads)
    return ServedTokens(*(part / WINDOW_S for part in parts))
