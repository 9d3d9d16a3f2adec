"""Whose waiting sequence is next: virtual token counters per tenant (VTC, Sheng et al., OSDI 2024).

In: waiting sequences and the cost of what was served. Out: sequences in fair order. The tenant that
was served least, priced and divided by its weight, goes first; within a tenant, first come first
served. A tenant that returns is lifted to the least counter of those waiting, so idling saves up no
credit. Bound (VTC's fairness theorem): while two tenants both wait and what they wait for is a turn,
their weighted service differs by at most twice the larger of one longest prompt's price, with its
adapter's load, and the price of everything running at once, with what it holds. A sequence marked as urgent (it was
preempted, or could not be placed while others passed it) is offered first. What fits, and when, is
for admission to decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Set

from app.engine.sequence import Sequence

#: Prices in prompt tokens. Output tokens are computed one by one (VTC uses 1 and 2); an adapter load
#: occupies the device about as long as a prefill of one token per rank row.
INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
RANK_ROW_PRICE = 1.0
#: What a running sequence holds is read in every step, and kept from others: each block and rank row, per token that
#: the sequence gets. A context of 1,000 tokens and an adapter of rank 64 each add one to a token's price of two.
HELD_BLOCK_PRICE = 1 / 64
HELD_ROW_PRICE = 1 / 64

#: Counters of absent tenants that are remembered; beyond it the lowest are forgotten, which favours
#: a returning tenant by at most the difference to the queue's least counter.
MAX_ABSENT_TENANTS = 4096


class _Tenant:
    __slots__ = ("counter", "num_waiting", "queue")

    def __init__(self) -> None:
        self.counter = 0.0
        self.num_waiting = 0  # in `queue` or urgent
        self.queue: dict[str, Sequence] = {}  # by request id, in arrival order


class FairQueue:
    """Waiting sequences of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._urgent: dict[str, Sequence] = {}
        self._num_waiting = 0
        self._waiting_tenants: set[str] = set()
        self._last_left = 0.0  # counter of the tenant that emptied the queue

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """Queue a new arrival behind its tenant's others."""
        self._enter(sequence).queue[sequence.request_id] = sequence

    def push_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence that had to give its blocks back first in line: its stream has stopped."""
        self._enter(sequence)
        self._urgent = {sequence.request_id: sequence, **self._urgent}

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that was admitted or aborted."""
        tenant = self._tenants[sequence.tenant_id]
        if self._urgent.pop(sequence.request_id, None) is None:
            del tenant.queue[sequence.request_id]
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            self._waiting_tenants.discard(sequence.tenant_id)
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._last_left = tenant.counter

    def waiting_tenants(self) -> Set[str]:
        """Tenants with a waiting sequence, as a live view."""
        return self._waiting_tenants

    def mark_urgent(self, sequence: Sequence) -> None:
        """Offer this sequence before all others from now on, in the order of marking."""
        if sequence.request_id not in self._urgent:
            del self._tenants[sequence.tenant_id].queue[sequence.request_id]
            self._urgent[sequence.request_id] = sequence

    def is_urgent(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._urgent

    @property
    def num_urgent(self) -> int:
        return len(self._urgent)

    def candidates(self) -> Iterator[Sequence]:
        """All waiting sequences in the order they should be tried. The queue must not change meanwhile.

        Each one offered counts as if it were admitted, so one tenant's backlog does not hide the others.
        """
        yield from self._urgent.values()
        heap = [
            (tenant.counter, index, iter(tenant.queue.values()))
            for index, tenant in enumerate(self._tenants.values())
            if tenant.queue
        ]
        heapq.heapify(heap)
        while heap:
            counter, index, queue = heap[0]
            sequence = next(queue, None)
            if sequence is None:
                heapq.heappop(heap)
                continue
            yield sequence
            cost = INPUT_PRICE * sequence.num_pending / sequence.request.weight
            heapq.heapreplace(heap, (counter + cost, index, queue))

    def charge_token(self, sequence: Sequence) -> None:
        """Count a generated token, and what the sequence held for it, against its tenant."""
        held = HELD_BLOCK_PRICE * sequence.num_blocks + HELD_ROW_PRICE * sequence.rank
        self.charge(sequence, OUTPUT_PRICE + held)

    def charge(self, sequence: Sequence, price: float) -> None:
        """Count served work, in prompt tokens, against the sequence's tenant."""
        self._tenants[sequence.tenant_id].counter += price / sequence.request.weight

    def gap(self) -> float:
        """How far the counters of tenants that wait are apart: what the bound is about, as of now."""
        tenants = self._tenants.copy()
        counters = [tenants[name].counter for name in self._waiting_tenants.copy() if name in tenants]
        return max(counters) - min(counters) if counters else 0.0

    def counters(self) -> dict[str, float]:
        """Virtual counter per known tenant."""
        return {tenant_id: tenant.counter for tenant_id, tenant in self._tenants.copy().items()}

    def forget_absent(self, present: set[str]) -> None:
        """Drop the lowest counters of tenants with nothing here, if there are too many."""
        if len(self._tenants) <= MAX_ABSENT_TENANTS:
            return
        absent = [t for t, tenant in self._tenants.items() if tenant.num_waiting == 0 and t not in present]
        if len(absent) > MAX_ABSENT_TENANTS:
            absent.sort(key=lambda tenant_id: self._tenants[tenant_id].counter)
            for tenant_id in absent[: len(absent) // 2]:
                del self._tenants[tenant_id]

    def _enter(self, sequence: Sequence) -> _Tenant:
        tenant = self._tenants.get(sequence.tenant_id)
        if tenant is None:
            tenant = self._tenants[sequence.tenant_id] = _Tenant()
        if tenant.num_waiting == 0:
            waiting = [self._tenants[other].counter for other in self._waiting_tenants]
            tenant.counter = max(tenant.counter, min(waiting) if waiting else self._last_left)
            self._waiting_tenants.add(sequence.tenant_id)
        tenant.num_waiting += 1
        self._num_waiting += 1
        return tenant
