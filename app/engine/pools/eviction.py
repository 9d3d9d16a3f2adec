"""Which of the things that may leave a tier leaves first: one rule for files, host memory and rank rows.

Each use has a cost, per unit of room, of getting the thing again. The lowest priority leaves first, and of equals the
one used longest ago:

    lru    the time of its last use
    lfu    age + uses                                  (LFU with dynamic ageing)
    cost   age + uses * cost / room                    (GreedyDual-Size-Frequency, Cherkasova 1998)

The age is the priority of the last thing that left, so that what was popular once grows old. `TenantQuota` keeps tenants
from pushing each other out: the tenants that have something in a tier share its room equally, what a tenant uses stays
while it has no more than its share there, and a tenant that has more makes room with its own. Each tier says itself
what may not leave (because it is pinned or in use), and makes the room: `adapter_pool` for rank rows, the store's
`bounded_set` for files and host memory.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.config import EvictionPolicy


class Priority(NamedTuple):
    """Compared as a tuple."""

    value: float
    last_used: int


#: Before every priority that a use can give.
NEVER = Priority(0.0, 0)


class EvictionOrder:
    """The priorities of one tier. Not for several threads at once."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._age = 0.0
        self._num_uses = 0

    def on_use(self, uses: int, cost_per_room: float) -> Priority:
        """The priority of a thing that is used now, for the `uses`-th time."""
        self._num_uses += 1
        worth = {"lru": 0.0, "lfu": 1.0, "cost": cost_per_room}[self.policy]
        return Priority(self._age + uses * worth, self._num_uses)

    def on_release(self, priority: Priority) -> Priority:
        """The priority of a thing whose use ends now: that is no further use, but as recent as one."""
        self._num_uses += 1
        return Priority(priority.value, self._num_uses)

    def on_evict(self, priority: Priority) -> None:
        """A thing of this priority has left to make room."""
        self._age = max(self._age, priority.value)


#: Users of one thing that are remembered: the first so many.
MAX_USERS = 8


class TenantQuota:
    """The books of one tier. Not for several threads at once."""

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}  # by tenant
        self._users: dict[str, set[str]] = {}  # by thing
        self._sizes: dict[str, int] = {}  # by thing

    def record_use(self, key: str, size: int, tenant_id: str) -> None:
        """A tenant uses a thing that is here, or comes now."""
        users = self._users.setdefault(key, set())
        self._sizes[key] = size
        if tenant_id not in users and len(users) < MAX_USERS:
            users.add(tenant_id)
            self._amounts[tenant_id] = self._amounts.get(tenant_id, 0) + size

    def remove(self, key: str) -> None:
        """A thing is no longer here."""
        size = self._sizes.pop(key, 0)
        for tenant_id in self._users.pop(key, ()):
            self._amounts[tenant_id] -= size
            if not self._amounts[tenant_id]:
                del self._amounts[tenant_id]

    def is_protected(self, key: str, tenant_id: str, capacity: int) -> bool:
        """Whether a thing is to stay as long as anything else can make room for this tenant."""
        if len(self._amounts) < 2 and tenant_id in self._amounts:
            return False  # nobody else has anything here
        share = self.share(tenant_id, capacity)
        return any(user != tenant_id and self._amounts[user] <= share for user in self._users.get(key, ()))

    def has_room(self, tenant_id: str, size: int, capacity: int) -> bool:
        """Whether a tenant would still be within its share with so much more."""
        return self._amounts.get(tenant_id, 0) + size <= self.share(tenant_id, capacity)

    def share(self, tenant_id: str, capacity: int) -> float:
        """What everybody who has something here, and this tenant, may have."""
        return capacity / (len(self._amounts) + (tenant_id not in self._amounts))

    def amount(self, tenant_id: str) -> int:
        """What a tenant has here."""
        return self._amounts.get(tenant_id, 0)
