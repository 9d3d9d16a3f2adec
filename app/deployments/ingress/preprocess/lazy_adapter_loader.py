"""Lazy loading: adapters that a request names before they are usable are registered and loaded while it waits.

An unregistered name is looked up by the configured resolvers in the caller's own tenant, if the caller may use it. A
registered adapter that was never loaded is loaded. All requests for a name share one call to the store.
`limits.max_pending_requests_per_adapter` and `limits.max_pending_cold_requests` bound the waiting requests, and each
waits at most `limits.adapter_load_timeout_s`; `ColdStartLimiter` applies the same limits to loaded adapters that are on
no device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from app.config import LimitsConfig
from app.deployments.ingress.dispatch.cold_start_limiter import PendingLimiter, adapter_wait_timeout
from app.deployments.ingress.principal import Principal, visible
from app.deployments.registry.feed.view import Key, RegistryView
from app.deployments.registry.models import AUTO, model_id
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.errors import QueueFull
from app.model_names import is_name, split_version

T = TypeVar("T")

#: A waiting request: done, with its error, once it gives way to another tenant's.
_GaveWay: TypeAlias = "asyncio.Future[QueueFull]"

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
        self._waiting_lookups, self._waiting_reads = PendingLimiter[_GaveWay](), PendingLimiter[_GaveWay]()

    async def register(self, names: Iterable[str], caller: Principal) -> bool:
        """Look up the unregistered names; True if one of them is usable now.

        Raises the errors of loading an adapter, QueueFull above the limits, NotReady after
        `limits.adapter_load_timeout_s`.
        """
        if not self._has_resolvers:
            return False
        plain = dict.fromkeys(split_version(name)[0] for name in names)
        unknown = [name for name in plain if self._may_look_up(name, caller)]
        if not unknown:
            return False
        with self._waiting(self._waiting_lookups, caller.tenant_id, caller) as gave_way:
            return any([await self._look_up(name, caller, gave_way) for name in unknown])

    async def read(self, name: str, owner_id: str, caller: Principal) -> None:
        """Return once a registered adapter is loaded. Raises AdapterUnreadable, QueueFull, NotReady."""
        key = (owner_id, name)
        with self._waiting(self._waiting_reads, key, caller) as gave_way:
            await self._result(
                self._reads.task(key, lambda: self._store.load_for_request(name, tenant_id=owner_id, who=caller.who)),
                name,
                gave_way,
            )

    async def close(self) -> None:
        await self._tasks.close()

    def _may_look_up(self, name: str, caller: Principal) -> bool:
        if not is_name(name) or name == AUTO or not caller.tenant.may_use(model_id(caller.tenant_id, name)):
            return False
        return visible(self._registry, caller, name) is None

    async def _look_up(self, name: str, caller: Principal, gave_way: _GaveWay) -> bool:
        tenant_id, key = caller.tenant_id, (caller.tenant_id, name)
        num_lookups = sum(owner_id == tenant_id for owner_id, _ in self._lookups)
        if key not in self._lookups and num_lookups >= MAX_LOOKUPS_PER_TENANT:
            raise QueueFull(
                f"{MAX_LOOKUPS_PER_TENANT} unregistered names are already being looked up; send it again later",
                retry_after_s=2,
            )
        task = self._lookups.task(key, lambda: self._store.resolve(name, tenant_id=tenant_id, who=caller.who))
        return await self._result(task, name, gave_way)

    @contextmanager
    def _waiting(self, limiter: PendingLimiter[_GaveWay], group: Hashable, caller: Principal) -> Iterator[_GaveWay]:
        """Count a request as waiting; the future has its error if it gives way. Raises QueueFull above the limits."""
        gave_way: _GaveWay = asyncio.get_running_loop().create_future()
        for other, refusal in limiter.add(gave_way, group, caller.tenant_id, self.limits):
            other.set_result(refusal)
        try:
            yield gave_way
        finally:
            limiter.remove(gave_way)

    async def _result(self, task: asyncio.Task[T], name: str, gave_way: _GaveWay) -> T:
        """The task's result; the task continues for others if this request ends. Raises NotReady, QueueFull."""
        either: list[asyncio.Future[Any]] = [task, gave_way]
        timeout_s = self.limits.adapter_load_timeout_s
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise gave_way.result() if gave_way.done() else adapter_wait_timeout(name, self.limits)
