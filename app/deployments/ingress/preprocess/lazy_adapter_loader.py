"""Lazy loading: adapters that a request names before they are usable are registered and loaded while it waits.

An unregistered name is looked up by the configured resolvers in the caller's own tenant, if the caller may use it. A
registered adapter that was never loaded is loaded. All requests for a name share one call to the store.
`limits.max_pending_requests_per_adapter` and `limits.max_pending_cold_requests` bound the waiting requests, and each
waits at most `limits.adapter_load_timeout_s`; `ColdStartLimiter` applies the same limits to loaded adapters that are on
no device.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from app.config import LimitsConfig
from app.deployments.ingress.dispatch.cold_start_limiter import adapter_wait_timeout
from app.deployments.ingress.principal import Principal, visible
from app.deployments.registry.feed.view import Key, RegistryView
from app.deployments.registry.models import AUTO, is_name
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.errors import QueueFull

K = TypeVar("K")
T = TypeVar("T")

#: Unregistered names that one ingress looks up at a time for one tenant.
MAX_LOOKUPS_PER_TENANT = 16


class LazyAdapterLoader:
    """One per ingress, on its event loop. `limits` may be replaced while it runs."""

    def __init__(
        self, registry: RegistryView, store: StoreService[SharedAdapter], limits: LimitsConfig, *, has_resolvers: bool
    ) -> None:
        self._registry = registry
        self._store = store
        self.limits = limits
        self._has_resolvers = has_resolvers
        self._tasks = Tasks()
        self._lookups: SingleFlight[Key, bool] = SingleFlight(self._tasks)
        self._reads: SingleFlight[Key, None] = SingleFlight(self._tasks)
        self._waiting_lookups: Counter[str] = Counter()  # requests by tenant
        self._waiting_reads: Counter[Key] = Counter()  # requests by name

    async def register(self, names: Iterable[str], caller: Principal) -> bool:
        """Look up the unregistered names; True if one of them is usable now.

        Raises the errors of loading an adapter, QueueFull above the limits, NotReady after
        `limits.adapter_load_timeout_s`.
        """
        if not self._has_resolvers:
            return False
        unknown = [name for name in dict.fromkeys(names) if self._may_look_up(name, caller)]
        if not unknown:
            return False
        with self._waiting(self._waiting_lookups, caller.tenant_id, "for unregistered names", "with other tenants'"):
            return any([await self._look_up(name, caller) for name in unknown])

    async def read(self, name: str, owner_id: str, caller: Principal) -> None:
        """Return once a registered adapter is loaded. Raises AdapterUnreadable, QueueFull, NotReady."""
        key = (owner_id, name)
        with self._waiting(self._waiting_reads, key, f"for adapter {name!r} to load", "for any"):
            await self._result(
                self._reads.task(key, lambda: self._store.load_for_request(name, tenant_id=owner_id, who=caller.who)),
                name,
            )

    async def close(self) -> None:
        await self._tasks.close()

    def _may_look_up(self, name: str, caller: Principal) -> bool:
        if not is_name(name) or name == AUTO or not caller.tenant.may_use(name):
            return False
        return visible(self._registry, caller, name) is None

    async def _look_up(self, name: str, caller: Principal) -> bool:
        tenant_id, key = caller.tenant_id, (caller.tenant_id, name)
        num_lookups = sum(owner_id == tenant_id for owner_id, _ in self._lookups)
        if key not in self._lookups and num_lookups >= MAX_LOOKUPS_PER_TENANT:
            raise QueueFull(
                f"{MAX_LOOKUPS_PER_TENANT} unregistered names are already being looked up; send it again later",
                retry_after_s=2,
            )
        task = self._lookups.task(key, lambda: self._store.resolve(name, tenant_id=tenant_id, who=caller.who))
        return await self._result(task, name)

    @contextmanager
    def _waiting(self, counts: Counter[K], key: K, purpose: str, others: str) -> Iterator[None]:
        """Count a request as waiting. Raises QueueFull above the limits."""
        num_same, num_all, limits = counts[key], counts.total(), self.limits
        if num_same >= limits.max_pending_requests_per_adapter or num_all >= limits.max_pending_cold_requests:
            raise QueueFull(
                f"{num_same} requests wait {purpose}, {num_all} {others}; "
                f"limits.max_pending_requests_per_adapter is {limits.max_pending_requests_per_adapter} and "
                f"limits.max_pending_cold_requests {limits.max_pending_cold_requests}; send it again later",
                retry_after_s=2,
            )
        counts[key] += 1
        try:
            yield
        finally:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    async def _result(self, task: asyncio.Task[T], name: str) -> T:
        """The task's result; the task continues for others if this request times out. Raises NotReady."""
        await asyncio.wait([task], timeout=self.limits.adapter_load_timeout_s)
        if not task.done():
            raise adapter_wait_timeout(name, self.limits)
        return task.result()
