"""Names that no ingress knows: the store is asked whether they can be served before a request for one is a 404.

In: names that a request uses, and its caller. Out: whether one of them is served now that was not before. Rule: only
what the caller may use is asked for, among its own tenant's names; one question per name, however many requests wait
for its answer; how many questions and how many waiting requests there are is bounded, per tenant and together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from app.config import LimitsConfig
from app.deployments.ingress.cold import not_read_in_time
from app.deployments.ingress.tenants import Caller, visible
from app.deployments.links.tasks import OncePerKey, Tasks
from app.deployments.registry.entries import AUTO, is_name
from app.deployments.registry.view import Key, RegistryView
from app.engine.errors import QueueFull

#: Names that one ingress asks for at a time, for one tenant.
MAX_NAMES = 16


class Resolves(Protocol):
    """The part of `StoreClient` that is used here."""

    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:
        """Look for a name that nobody has registered: True when every ingress serves it."""
        ...


class Unregistered:
    """One per ingress, on its event loop. `is_on`: whether the configuration has any place to look for names."""

    def __init__(self, registry: RegistryView, store: Resolves, limits: LimitsConfig, *, is_on: bool) -> None:
        self._registry = registry
        self._store = store
        self.limits = limits
        self._is_on = is_on
        self._waiting: Counter[str] = Counter()  # tenants, and how many of their requests wait for an answer
        self._tasks = Tasks()
        self._asking: OncePerKey[Key, bool] = OncePerKey(self._tasks)

    async def ask(self, names: Iterable[str], caller: Caller) -> bool:
        """Whether any of these is served now that nobody had registered.

        Raises what reading an adapter raises, QueueFull where too many wait, NotReady after `limits.adapter_wait_s`.
        """
        if not self._is_on:
            return False
        unknown = [name for name in dict.fromkeys(names) if self._may_ask(name, caller)]
        if not unknown:
            return False
        self._check_room(caller.tenant_id)
        self._waiting[caller.tenant_id] += 1
        try:
            return any([await self._answer(name, caller) for name in unknown])
        finally:
            self._waiting[caller.tenant_id] -= 1
            if not self._waiting[caller.tenant_id]:
                del self._waiting[caller.tenant_id]

    async def close(self) -> None:
        await self._tasks.close()

    def _may_ask(self, name: str, caller: Caller) -> bool:
        if not is_name(name) or name == AUTO or not caller.tenant.may_use(name):
            return False
        return visible(self._registry, caller, name) is None

    def _check_room(self, tenant_id: str) -> None:
        mine, everybodys = self._waiting[tenant_id], self._waiting.total()
        limits = self.limits
        if mine >= limits.max_waiting_per_adapter or everybodys >= limits.max_waiting_for_adapters:
            raise QueueFull(
                f"{mine} requests wait for names that nobody has registered, {everybodys} with other tenants'; "
                f"limits.max_waiting_per_adapter is {limits.max_waiting_per_adapter} and "
                f"limits.max_waiting_for_adapters {limits.max_waiting_for_adapters}; send it again later",
                retry_after_s=2,
            )

    async def _answer(self, name: str, caller: Caller) -> bool:
        key = (caller.tenant_id, name)
        if key not in self._asking and sum(key[0] == tenant_id for tenant_id, _ in self._asking) >= MAX_NAMES:
            raise QueueFull(
                f"{MAX_NAMES} names that nobody has registered are being looked for; send it again later",
                retry_after_s=2,
            )
        task = self._asking.task(key, lambda: self._store.resolve(name, tenant_id=caller.tenant_id, who=caller.who))
        await asyncio.wait([task], timeout=self.limits.adapter_wait_s)
        if not task.done():
            raise not_read_in_time(name, self.limits)
        return task.result()
