"""Whose things fill a tier, and which of them others may push out: a tenant's thousand adapters, and another's one.

In: who used which thing of what size, and what has left. Out: whether a thing is kept from somebody who wants its room.
Rule: a tier's room is shared equally by the tenants that have something in it; what a tenant uses stays while it has no
more than its share there, and somebody who has more makes room with its own. Where nobody else wants the room, one may
have all of it. A thing that several use counts for each of them, and stays if any of them keeps it.
"""

from __future__ import annotations

#: Users of one thing that are remembered: the first so many.
MAX_USERS = 8


class Shares:
    """The books of one tier. Not for several threads at once."""

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}  # by tenant
        self._users: dict[str, set[str]] = {}  # by thing
        self._sizes: dict[str, int] = {}  # by thing

    def used(self, key: str, size: int, tenant_id: str) -> None:
        """A tenant uses a thing that is here, or comes now."""
        users = self._users.setdefault(key, set())
        self._sizes[key] = size
        if tenant_id not in users and len(users) < MAX_USERS:
            users.add(tenant_id)
            self._amounts[tenant_id] = self._amounts.get(tenant_id, 0) + size

    def left(self, key: str) -> None:
        """A thing is no longer here."""
        size = self._sizes.pop(key, 0)
        for tenant_id in self._users.pop(key, ()):
            self._amounts[tenant_id] -= size
            if not self._amounts[tenant_id]:
                del self._amounts[tenant_id]

    def is_kept(self, key: str, tenant_id: str, capacity: int) -> bool:
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
