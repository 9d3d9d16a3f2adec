"""Whose waiting sequence is next: virtual token counters per tenant (VTC, Sheng et al., OSDI 2024).

In: waiting sequences and the cost of what was served. Out: sequences in fair order. The tenant that
was served least, priced and divided by its weight, goes first; within a tenant, first come first
served. A tenant that returns is lifted to the least counter of those waiting, so idling saves up no
credit. Bound (VTC's fairness theorem): while two tenants both wait and what they wait for is a turn,
their weighted service differs by at most twice the larger of one longest prompt's price, with its
adapter's load, and the price of everything running at once, with what it holds. With `engine.max_tenant_slowdown` it is
`MAX_LEAD` more: a tenant may be given the place of another's stream, ahead of this order, until it was served by so
much more than any tenant that waits. A sequence marked as urgent (it was
preempted, or could not be placed while others passed it) is offered first. What fits, and when, is
for admission to decide.

Over several replicas: a tenant that was served more elsewhere than the others that wait here owes the difference
(`add_remote_service`), and while it does, whatever it gets here is charged up to `SURCHARGE` times. So of two tenants that
wait here, none gets less here than the other's service divided by `SURCHARGE`, but for one bound, and one that owes
nothing is ahead over all replicas by at most `SURCHARGE` bounds, and what was not told yet. What exceeds `MAX_REMOTE_DEBT` is
forgiven. Who hears nothing from elsewhere charges nothing for it.

There are two classes, each with counters of its own: batches' sequences, for which nobody waits, are offered after all
others. The bound holds within a class.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Set

from app.engine.sequence import Sequence, Status
from app.engine.stats import TenantService

#: Prices in prompt tokens. Output tokens are computed one by one (VTC uses 1 and 2); an adapter load
#: occupies the device about as long as a prefill of one token per rank row.
INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
RANK_ROW_PRICE = 1.0
#: What a running sequence holds is read in every step, and kept from others: each block and rank row, per token that
#: the sequence gets. A context of 1,000 tokens and an adapter of rank 64 each add one to a token's price of two.
HELD_BLOCK_PRICE = 1 / 64
HELD_ROW_PRICE = 1 / 64

#: By how much more a tenant may have been served, in these prices and by weight, and still be given another's place.
MAX_LEAD = 4096.0

#: What is served here to a tenant that was served more elsewhere is charged so many times at most, and
#: what it owes for that is no more than this, in these prices and by weight: it bounds what a wrong report can do.
SURCHARGE = 4.0
MAX_REMOTE_DEBT = 16384.0

#: Counters of absent tenants that are remembered; beyond it the lowest are forgotten, which favours
#: a returning tenant by at most the difference to the queue's least counter.
MAX_ABSENT_TENANTS = 4096


class _Tenant:
    __slots__ = ("counter", "debt", "elsewhere", "num_waiting", "queue", "served")

    def __init__(self) -> None:
        self.counter = 0.0
        self.served = 0.0  # weighted service here since it is known: only grows, and absence does not lift it
        self.remote_served: float | None = None  # the same of other replicas, as last heard while it waits
        self.remote_debt = 0.0  # by how much more it was served elsewhere than others that wait here
        self.num_waiting = 0  # in `queue` or urgent
        self.queue: dict[str, Sequence] = {}  # by request id, in arrival order


class _Class:
    """The tenants of one class, and what of them waits."""

    __slots__ = ("last_left", "num_waiting", "tenants", "urgent", "waiting_tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.urgent: dict[str, Sequence] = {}
        self.num_waiting = 0
        self.waiting_tenants: dict[str, None] = {}  # in the order in which they began to wait
        self.last_counter = 0.0  # counter of the tenant that emptied the class

    def enter(self, sequence: Sequence) -> _Tenant:
        tenant = self.tenants.get(sequence.tenant_id)
        if tenant is None:
            tenant = self.tenants[sequence.tenant_id] = _Tenant()
        if tenant.num_waiting == 0:
            waiting = [self.tenants[other].counter for other in self.waiting_tenants]
            lift = max(0.0, (min(waiting) if waiting else self.last_counter) - tenant.counter)
            tenant.counter += lift
            tenant.remote_debt = max(0.0, tenant.remote_debt - lift)  # the credit that an absence loses pays it
            self.waiting_tenants[sequence.tenant_id] = None
        tenant.num_waiting += 1
        self.num_waiting += 1
        return tenant

    def remove(self, sequence: Sequence) -> None:
        tenant = self.tenants[sequence.tenant_id]
        if self.urgent.pop(sequence.request_id, None) is None:
            del tenant.queue[sequence.request_id]
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            del self.waiting_tenants[sequence.tenant_id]
            tenant.remote_served = None
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.last_counter = tenant.counter

    def candidates(self) -> Iterator[Sequence]:
        yield from self.urgent.values()
        tenants = [tenant for tenant in self.tenants.values() if tenant.queue]
        heap = [(tenant.counter, index, iter(tenant.queue.values())) for index, tenant in enumerate(tenants)]
        heapq.heapify(heap)
        while heap:
            counter, index, queue = heap[0]
            sequence = next(queue, None)
            if sequence is None:
                heapq.heappop(heap)
                continue
            before = tenants[index].counter
            yield sequence
            is_admitted = sequence.status is Status.RUNNING
            charged = tenants[index].counter - before
            cost = charged if is_admitted else INPUT_PRICE * sequence.num_pending / sequence.request.weight
            heapq.heapreplace(heap, (counter + cost, index, queue))

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        waiting = [(name, self.tenants[name]) for name in self.waiting_tenants]
        for name, tenant in waiting:
            before, tenant.remote_served = tenant.remote_served, served.get(name)
            if continues and before is not None and tenant.remote_served is not None:
                tenant.remote_debt += max(0.0, tenant.remote_served - before)
        least = min((tenant.remote_debt for _, tenant in waiting), default=0.0)
        for _, tenant in waiting:
            tenant.remote_debt = min(tenant.remote_debt - least, MAX_REMOTE_DEBT)

    def forget_absent(self, present: set[str]) -> None:
        if len(self.tenants) <= MAX_ABSENT_TENANTS:
            return
        absent = [t for t, tenant in self.tenants.items() if tenant.num_waiting == 0 and t not in present]
        if len(absent) > MAX_ABSENT_TENANTS:
            absent.sort(key=lambda tenant_id: self.tenants[tenant_id].counter)
            for tenant_id in absent[: len(absent) // 2]:
                del self.tenants[tenant_id]


class FairQueue:
    """Waiting sequences of all tenants."""

    def __init__(self) -> None:
        self._interactive, self._batches = _Class(), _Class()

    def __len__(self) -> int:
        return self._interactive.num_waiting + self._batches.num_waiting

    def push(self, sequence: Sequence) -> None:
        """Queue a new arrival behind its tenant's others."""
        self._class(sequence).enter(sequence).queue[sequence.request_id] = sequence

    def push_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence that had to give its blocks back first of its class: its stream has stopped."""
        mine = self._class(sequence)
        mine.enter(sequence)
        mine.urgent = {sequence.request_id: sequence, **mine.urgent}

    def push_back(self, sequence: Sequence) -> None:
        """Queue a sequence that gave its place to another tenant's first of its tenant's."""
        tenant = self._class(sequence).enter(sequence)
        tenant.queue = {sequence.request_id: sequence, **tenant.queue}

    def first_of_each(self) -> list[Sequence]:
        """A waiting sequence of each tenant that waits, batches aside: the one it waits longest with."""
        firsts = {sequence.tenant_id: sequence for sequence in reversed(self._interactive.urgent.values())}
        tenants = self._interactive.tenants
        for tenant_id in self._interactive.waiting_tenants:
            if tenant_id not in firsts:
                firsts[tenant_id] = next(iter(tenants[tenant_id].queue.values()))
        return list(firsts.values())

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that was admitted or aborted."""
        self._class(sequence).remove(sequence)

    def waiting_tenants(self) -> Set[str]:
        """Tenants with a waiting sequence that is no batch's, as a live view."""
        return self._interactive.waiting_tenants.keys()

    def mark_urgent(self, sequence: Sequence) -> None:
        """Offer this sequence before all others from now on, in the order of marking. Not for batches'."""
        if sequence.request_id not in self._interactive.urgent:
            del self._interactive.tenants[sequence.tenant_id].queue[sequence.request_id]
            self._interactive.urgent[sequence.request_id] = sequence

    def is_urgent(self, sequence: Sequence) -> bool:
        """Whether it is offered before all others; a batch's never is."""
        return sequence.request_id in self._interactive.urgent

    @property
    def num_urgent(self) -> int:
        return len(self._interactive.urgent)

    def candidates(self) -> Iterator[Sequence]:
        """All waiting sequences in the order they should be tried. The queue must not change meanwhile.

        Each one offered counts as what it was charged, or as if it were admitted if it was not, so one tenant's backlog
        does not hide the others.
        """
        yield from self._interactive.candidates()
        yield from self._batches.candidates()

    def charge_token(self, sequence: Sequence) -> None:
        """Count a generated token, and what the sequence held for it, against its tenant."""
        held = HELD_BLOCK_PRICE * sequence.num_blocks + HELD_ROW_PRICE * sequence.num_needed
        self.charge(sequence, OUTPUT_PRICE + held)

    def charge(self, sequence: Sequence, price: float) -> None:
        """Count served work, in prompt tokens, against the sequence's tenant."""
        tenant = self._class(sequence).tenants[sequence.tenant_id]
        price /= sequence.request.weight
        extra = min(tenant.remote_debt, (SURCHARGE - 1) * price)
        tenant.remote_debt -= extra
        tenant.served += price
        tenant.counter += price + extra

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Learn what tenants that wait here were served on other replicas: totals that grow, priced and by weight.

        `continues`: what is new since the last such call was served while this queue listened, and counts. Otherwise,
        and for a tenant that has just begun to wait, a total is only where counting begins. One that has become smaller
        (a replica has left, placement has restarted) counts nothing.
        """
        self._interactive.add_remote_service(served, continues=continues)

    def service(self) -> TenantService:
        """Batches aside, what tenants were served here, without what was charged for other replicas. Any thread."""
        served = {tenant_id: tenant.served for tenant_id, tenant in self._interactive.tenants.copy().items()}
        return TenantService(served, tuple(self._interactive.waiting_tenants.copy()))

    def remote_debt_of(self, tenant_id: str) -> float:
        """What a tenant owes for service elsewhere; 0 of one that is not known."""
        tenant = self._interactive.tenants.get(tenant_id)
        return tenant.remote_debt if tenant is not None else 0.0

    def gap(self) -> float:
        """How far the counters of tenants that wait are apart: what the bound is about, as of now."""
        tenants = self._interactive.tenants.copy()
        counters = [tenants[name].counter for name in self._interactive.waiting_tenants.copy() if name in tenants]
        return max(counters) - min(counters) if counters else 0.0

    def least_waiting(self) -> float:
        """Virtual counter of the tenant that was served least of those that wait, batches aside; infinite of none."""
        return min(
            (self._interactive.tenants[name].counter for name in self._interactive.waiting_tenants), default=math.inf
        )

    def counter_of(self, tenant_id: str) -> float:
        """Virtual counter of a tenant, batches aside; 0 of one that is not known."""
        tenant = self._interactive.tenants.get(tenant_id)
        return tenant.counter if tenant is not None else 0.0

    def counters(self) -> dict[str, float]:
        """Virtual counter per known tenant, batches aside."""
        return {tenant_id: tenant.counter for tenant_id, tenant in self._interactive.tenants.copy().items()}

    def forget_absent(self, present: set[str]) -> None:
        """Drop the lowest counters of tenants with nothing here, if there are too many."""
        self._interactive.forget_absent(present)
        self._batches.forget_absent(present)

    def _class(self, sequence: Sequence) -> _Class:
        return self._batches if sequence.request.is_batch else self._interactive
