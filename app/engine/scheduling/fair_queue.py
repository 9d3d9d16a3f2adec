"""The fair queue: waiting sequences in the order of virtual token counters per tenant (VTC, Sheng et al., OSDI 2024).

The tenant that was served least, priced and divided by its weight, goes first; within a tenant, first come first
served. A returning tenant is lifted to the lowest counter of the waiting tenants, so idling earns no credit. Urgent
sequences (preempted, or passed by others because they did not fit) are offered first. What fits, and when, is for
admission to decide.

VTC's bound: while two tenants both wait for a turn, their weighted service differs by at most twice the larger of one
longest prompt's price, with its adapter load, and the price of everything running at once, with what it holds.
Where all places are taken, `MAX_LEAD` is added: a tenant may get the place of another's stream, ahead of this order,
until it is that far ahead of every waiting tenant.

Over several replicas: `add_remote_service` reports what other replicas served. A tenant that got more there than the
other tenants that wait here has a remote debt, and its service here is charged up to `SURCHARGE` times until the debt
is paid. So no waiting tenant gets less here than another's service divided by `SURCHARGE`, apart from one bound, and a
tenant without debt is ahead over all replicas by at most `SURCHARGE` bounds plus what is not reported yet. Debt above
`MAX_REMOTE_DEBT` is forgiven. Without reports nothing is charged.

There are two classes with their own counters: interactive sequences, then batch ones. The bound holds within a class.
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
#: A running sequence's blocks and rank rows are read in every step and kept from others, so each is charged per
#: generated token: a context of 1,000 tokens and an adapter of rank 64 each add one to a token's price of two.
HELD_BLOCK_PRICE = 1 / 64
HELD_ROW_PRICE = 1 / 64

#: The lead, in these prices and by weight, up to which a tenant may still be given another's place.
MAX_LEAD = 4096.0

#: The factor on the charges of a tenant with remote debt, and the most debt it may have, in these prices and by weight.
#: The latter bounds the effect of a wrong report.
SURCHARGE = 4.0
MAX_REMOTE_DEBT = 16384.0

#: The number of absent tenants whose counters are kept. Beyond it the lowest are dropped, which favours a returning
#: tenant by at most the difference to the queue's lowest counter.
MAX_ABSENT_TENANTS = 4096


class _Tenant:
    __slots__ = ("counter", "num_waiting", "queue", "remote_debt", "remote_served", "served")

    def __init__(self) -> None:
        self.counter = 0.0
        self.served = 0.0  # weighted service here; only grows, not lifted after an absence
        self.remote_served: float | None = None  # the same on other replicas, as last reported while it waits
        self.remote_debt = 0.0  # how much more other replicas served it than others that wait here
        self.num_waiting = 0  # in `queue` or urgent
        self.queue: dict[str, Sequence] = {}  # by request id, in arrival order


class _Class:
    """The tenants of one class, and their waiting sequences."""

    __slots__ = ("last_counter", "num_waiting", "tenants", "urgent", "waiting_tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.urgent: dict[str, Sequence] = {}
        self.num_waiting = 0
        self.waiting_tenants: dict[str, None] = {}  # in the order in which they began to wait
        self.last_counter = 0.0  # counter of the tenant whose sequence was the last to leave

    def enter(self, sequence: Sequence) -> _Tenant:
        tenant = self.tenants.get(sequence.tenant_id)
        if tenant is None:
            tenant = self.tenants[sequence.tenant_id] = _Tenant()
        if tenant.num_waiting == 0:
            waiting = [self.tenants[other].counter for other in self.waiting_tenants]
            lift = max(0.0, (min(waiting) if waiting else self.last_counter) - tenant.counter)
            tenant.counter += lift
            tenant.remote_debt = max(0.0, tenant.remote_debt - lift)  # the credit lost by the absence pays debt
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
        """Queue a new sequence behind its tenant's others."""
        self._class(sequence).enter(sequence).queue[sequence.request_id] = sequence

    def push_preempted(self, sequence: Sequence) -> None:
        """Queue a preempted sequence first of its class: its stream has stopped."""
        own_class = self._class(sequence)
        own_class.enter(sequence)
        own_class.urgent = {sequence.request_id: sequence, **own_class.urgent}

    def push_back(self, sequence: Sequence) -> None:
        """Queue a sequence that gave its place to another tenant's, first of its tenant's."""
        tenant = self._class(sequence).enter(sequence)
        tenant.queue = {sequence.request_id: sequence, **tenant.queue}

    def first_of_each(self) -> list[Sequence]:
        """The next sequence of each waiting tenant, without batch sequences."""
        firsts = {sequence.tenant_id: sequence for sequence in reversed(self._interactive.urgent.values())}
        tenants = self._interactive.tenants
        for tenant_id in self._interactive.waiting_tenants:
            if tenant_id not in firsts:
                firsts[tenant_id] = next(iter(tenants[tenant_id].queue.values()))
        return list(firsts.values())

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or aborted."""
        self._class(sequence).remove(sequence)

    def waiting_tenants(self) -> Set[str]:
        """Tenants with a waiting interactive sequence, as a live view."""
        return self._interactive.waiting_tenants.keys()

    def mark_urgent(self, sequence: Sequence) -> None:
        """Offer this interactive sequence before all others from now on, in the order of marking."""
        if sequence.request_id not in self._interactive.urgent:
            del self._interactive.tenants[sequence.tenant_id].queue[sequence.request_id]
            self._interactive.urgent[sequence.request_id] = sequence

    def is_urgent(self, sequence: Sequence) -> bool:
        """Whether it is offered before all others; batch sequences never are."""
        return sequence.request_id in self._interactive.urgent

    @property
    def num_urgent(self) -> int:
        return len(self._interactive.urgent)

    def candidates(self) -> Iterator[Sequence]:
        """All waiting sequences in the order to try them. The queue must not change during the iteration.

        Each offered sequence advances its tenant's position by its charge, or by its prompt's price if it was not
        admitted, so that one tenant's backlog does not hide the others.
        """
        yield from self._interactive.candidates()
        yield from self._batches.candidates()

    def charge_token(self, sequence: Sequence) -> None:
        """Charge a generated token, and the memory held for it, to the sequence's tenant."""
        held = HELD_BLOCK_PRICE * sequence.num_blocks + HELD_ROW_PRICE * sequence.num_rank_rows_needed
        self.charge(sequence, OUTPUT_PRICE + held)

    def charge(self, sequence: Sequence, price: float) -> None:
        """Charge served work, in prompt tokens, to the sequence's tenant."""
        tenant = self._class(sequence).tenants[sequence.tenant_id]
        price /= sequence.request.weight
        extra = min(tenant.remote_debt, (SURCHARGE - 1) * price)
        tenant.remote_debt -= extra
        tenant.served += price
        tenant.counter += price + extra

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Record what other replicas served to tenants that wait here: growing totals, priced and by weight.

        `continues`: no report was missed since the last call, so the increase counts. Otherwise, and for a tenant that
        has just begun to wait, a total is only the starting point. A total that has shrunk (a replica has left,
        placement has restarted) counts as no increase.
        """
        self._interactive.add_remote_service(served, continues=continues)

    def service(self) -> TenantService:
        """What interactive requests were served here per tenant, without surcharges. Any thread."""
        served = {tenant_id: tenant.served for tenant_id, tenant in self._interactive.tenants.copy().items()}
        return TenantService(served, tuple(self._interactive.waiting_tenants.copy()))

    def remote_debt_of(self, tenant_id: str) -> float:
        """A tenant's remote debt; 0 for an unknown tenant."""
        tenant = self._interactive.tenants.get(tenant_id)
        return tenant.remote_debt if tenant is not None else 0.0

    def gap(self) -> float:
        """The current spread of the waiting tenants' counters, which VTC bounds."""
        tenants = self._interactive.tenants.copy()
        counters = [tenants[name].counter for name in self._interactive.waiting_tenants.copy() if name in tenants]
        return max(counters) - min(counters) if counters else 0.0

    def least_waiting(self) -> float:
        """The lowest counter of the tenants with waiting interactive sequences; infinite if there are none."""
        return min(
            (self._interactive.tenants[name].counter for name in self._interactive.waiting_tenants), default=math.inf
        )

    def counter_of(self, tenant_id: str) -> float:
        """A tenant's counter in the interactive class; 0 for an unknown tenant."""
        tenant = self._interactive.tenants.get(tenant_id)
        return tenant.counter if tenant is not None else 0.0

    def forget_absent(self, present: set[str]) -> None:
        """Drop the lowest counters of tenants without sequences here, if there are too many."""
        self._interactive.forget_absent(present)
        self._batches.forget_absent(present)

    def _class(self, sequence: Sequence) -> _Class:
        return self._batches if sequence.request.is_batch else self._interactive
