"""Eviction: which adapter leaves a full tier first. One rule for files, host memory and rank rows.

Each use has a cost, per unit of size, of loading the adapter again. The lowest priority leaves first, and of equals the
least recently used:

    lru    the time of its last use
    lfu    age + uses                                  (LFU with dynamic ageing)
    cost   age + uses * cost / size                    (GreedyDual-Size-Frequency, Cherkasova 1998)

The age is the priority of the last evicted item, so that popularity fades. `TenantQuota` keeps tenants from evicting
each other's adapters: the tenants with items in a tier share it equally, a tenant's items are protected while it holds
no more than its share, and a tenant above its share evicts its own. Each tier decides itself what cannot leave (pinned
or in use) and frees the room: `adapter_pool` for rank rows, `app.deployments.store.bytes_bounded_cache` for files and
host memory.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.config import EvictionPolicy


class Priority(NamedTuple):
    """Compared as a tuple."""

    value: float
    last_used: int


#: Lower than every priority of a used item.
NEVER = Priority(0.0, 0)


class EvictionOrder:
    """The priorities of one tier. Not thread-safe."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._age = 0.0
        self._num_uses = 0

    def on_use(self, uses: int, cost_per_size: float) -> Priority:
        """The priority of an item at its `uses`-th use."""
        self._num_uses += 1
        worth = {"lru": 0.0, "lfu": 1.0, "cost": cost_per_size}[self.policy]
        return Priority(self._age + uses * worth, self._num_uses)

    def on_release(self, priority: Priority) -> Priority:
        """The priority of an item whose use ends: not one more use, but as recent as one."""
        self._num_uses += 1
        return Priority(priority.value, self._num_uses)

    def on_evict(self, priority: Priority) -> None:
        """Record that an item of this priority was evicted."""
        self._age = max(self._age, priority.value)


#: Tenants recorded per item: the first so many.
MAX_USERS = 8


class TenantQuota:
    """What each tenant holds in one tier, and its share. Not thread-safe."""

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}  # by tenant
        self._users: dict[str, set[str]] = {}  # by item
        self._sizes: dict[str, int] = {}  # by item

    def record_use(self, key: str, size: int, tenant_id: str) -> None:
        """A tenant uses an item of the tier."""
        users = self._users.setdefault(key, set())
        self._sizes[key] = size
        if tenant_id not in users and len(users) < MAX_USERS:
            users.add(tenant_id)
            self._amounts[tenant_id] = self._amounts.get(tenant_id, 0) + size

    def remove(self, key: str) -> None:
        """An item has left the tier."""
        size = self._sizes.pop(key, 0)
        for tenant_id in self._users.pop(key, ()):
            self._amounts[tenant_id] -= size
            if not self._amounts[tenant_id]:
                del self._amounts[tenant_id]

    def is_protected(self, key: str, tenant_id: str, capacity: int) -> bool:
        """Whether an item must stay as long as another can make room for this tenant."""
        if len(self._amounts) < 2 and tenant_id in self._amounts:
            return False  # no other tenant has items here
        share = self.share(tenant_id, capacity)
        return any(user != tenant_id and self._amounts[user] <= share for user in self._users.get(key, ()))

    def has_room(self, tenant_id: str, size: int, capacity: int) -> bool:
        """Whether a tenant would still be within its share with `size` more."""
        return self._amounts.get(tenant_id, 0) + size <= self.share(tenant_id, capacity)

    def share(self, tenant_id: str, capacity: int) -> float:
        """The part of the capacity for each tenant with items here, this one included."""
        return capacity / (len(self._amounts) + (tenant_id not in self._amounts))
