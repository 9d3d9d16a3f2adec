"""Recent throughput of every tenant, in the process that owns the ledger.

Batches are counted as they enter the ledger. At most `MAX_NAMED` tenants are named, the rest is in `OTHER`, so the sum
covers everybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from app.deployments.tenancy.usage.flusher import Row, UsageRecord

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Length of the window, and of its steps.
WINDOW_S, STEP_S = 60.0, 5.0
#: Tenants that are named.
MAX_NAMED = 32
OTHER = "other"
#: Token prices of the engines' fair queue, for uncached prompt tokens and generated tokens.
_INPUT_PRICE, _OUTPUT_PRICE = 1.0, 2.0


class ServedTokens(NamedTuple):
    """One tenant's tokens and adapter loads per second."""

    prompt: float
    cached: float
    completion: float
    loads: float


class SlidingSums(Generic[K, V]):
    """Sums per key over the last minute; keys without recent amounts are dropped.

    Not thread-safe. `clock` gives monotonic seconds; `plus` adds two amounts.
    """

    def __init__(self, clock: Callable[[], float], plus: Callable[[V, V], V]) -> None:
        self._clock = clock
        self._plus = plus
        self._steps: deque[tuple[float, dict[K, V]]] = deque()

    def add(self, key: K, amount: V) -> None:
        now_s = self._clock()
        self._drop_old(now_s)
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, {}))
        self._add(self._steps[-1][1], key, amount)

    def sums(self) -> Mapping[K, V]:
        """Sums of all keys with an amount in the last minute."""
        self._drop_old(self._clock())
        sums: dict[K, V] = {}
        for _, step in self._steps:
            for key, amount in step.items():
                self._add(sums, key, amount)
        return sums

    def _add(self, sums: dict[K, V], key: K, amount: V) -> None:
        sums[key] = self._plus(sums[key], amount) if key in sums else amount

    def _drop_old(self, now_s: float) -> None:
        while self._steps and now_s - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()


class TenantThroughput:
    """One event loop. `clock` gives monotonic seconds; `weight` is a tenant's weight."""

    def __init__(self, weight: Callable[[str], float], clock: Callable[[], float]) -> None:
        self._weight = weight
        self._recent: SlidingSums[str, UsageRecord] = SlidingSums(clock, UsageRecord.plus)

    def add(self, rows: Iterable[Row]) -> None:
        """Count a batch that is new in the ledger."""
        for key, usage in rows:
            self._recent.add(key.project_id, usage)

    def by_tenant(self) -> Mapping[str, ServedTokens]:
        """Throughput by tenant: the largest ones, and the others together."""
        sums = self._recent.sums()
        largest = sorted(sums, key=lambda tenant_id: (-_service(sums[tenant_id]), tenant_id))
        named = {tenant_id: _per_second(sums[tenant_id]) for tenant_id in largest[:MAX_NAMED]}
        rest = UsageRecord()
        for tenant_id in largest[MAX_NAMED:]:
            rest = rest.plus(sums[tenant_id])
        return named | ({OTHER: _per_second(rest)} if largest[MAX_NAMED:] else {})

    def jain_index(self) -> float:
        """1 if all active tenants were served in proportion to their weights, 1/n if one of n got everything (Jain
        1984).
        """
        services = [_service(usage) / self._weight(tenant_id) for tenant_id, usage in self._recent.sums().items()]
        return jain_index([service for service in services if service])


def jain_index(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2); 1 for no values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def weighted_tokens(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
    """Tokens by their computing cost, in prompt tokens."""
    return _INPUT_PRICE * (prompt_tokens - cached_tokens) + _OUTPUT_PRICE * completion_tokens


def _service(usage: UsageRecord) -> float:
    return weighted_tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _per_second(usage: UsageRecord) -> ServedTokens:
    parts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.num_loads)
    return ServedTokens(*(part / WINDOW_S for part in parts))
