"""Adapters that are registered and have not been read: the first request for one waits until it has been.

In: a name, whose it is, and who asks. Out: when every ingress serves it, or why not. Rule: one question to the store
per name, however many requests wait for its answer, which are counted as those for an adapter on no device are: at most
`limits.max_waiting_per_adapter` for one and `limits.max_waiting_for_adapters` for all, for `limits.adapter_wait_s`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from app.config import LimitsConfig
from app.deployments.ingress.cold import not_read_in_time
from app.deployments.ingress.tenants import Caller
from app.deployments.links.tasks import OncePerKey, Tasks
from app.deployments.registry.view import Key
from app.engine.errors import QueueFull


class ReadsNames(Protocol):
    """The part of `StoreClient` that is used here."""

    async def read_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        """Have every ingress serve a registered name. Raises AdapterUnreadable."""
        ...


class FirstReads:
    """One per ingress, on its event loop. `limits` may be replaced."""

    def __init__(self, store: ReadsNames, limits: LimitsConfig) -> None:
        self._store = store
        self.limits = limits
        self._waiting: Counter[Key] = Counter()  # requests per name
        self._tasks = Tasks()
        self._reading: OncePerKey[Key, None] = OncePerKey(self._tasks)

    async def read(self, name: str, owner_id: str, caller: Caller) -> None:
        """Returns when it has been read. Raises AdapterUnreadable, QueueFull, NotReady."""
        key = (owner_id, name)
        self._check_room(key)
        task = self._reading.task(key, lambda: self._store.read_for_request(name, tenant_id=owner_id, who=caller.who))
        self._waiting[key] += 1
        try:
            await asyncio.wait([task], timeout=self.limits.adapter_wait_s)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
        if not task.done():
            raise not_read_in_time(name, self.limits)
        task.result()

    async def close(self) -> None:
        await self._tasks.close()

    def _check_room(self, key: Key) -> None:
        mine, everybodys, limits = self._waiting[key], self._waiting.total(), self.limits
        if mine >= limits.max_waiting_per_adapter or everybodys >= limits.max_waiting_for_adapters:
            raise QueueFull(
                f"{mine} requests wait for adapter {key[1]!r} to be read, {everybodys} for any; "
                f"limits.max_waiting_per_adapter is {limits.max_waiting_per_adapter} and "
                f"limits.max_waiting_for_adapters {limits.max_waiting_for_adapters}; send it again later",
                retry_after_s=2,
            )
