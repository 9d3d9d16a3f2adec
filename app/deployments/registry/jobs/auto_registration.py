"""Registration of unknown names: resolvers look for an adapter when a request first uses its name.

A name is looked up once however many requests use it, and a name that was not found is not looked up again for a while.
A name that its tenant has used before (as an adapter or an alias, or for a load or unload) is left to the tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from app.deployments.registry.feed.view import Key
from app.deployments.registry.jobs.failure_backoff import FailureBackoff, failure_key
from app.deployments.registry.jobs.load_jobs import Reader
from app.deployments.registry.models import AUTO, LoadRequest, State
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.engine.errors import NotFound, SourceError
from app.model_names import is_name

#: Size of the negative cache; beyond it the oldest name is forgotten.
MAX_ABSENT = 10_000
#: Resolver calls at a time, in all and per tenant, so that a tenant whose resolver hangs delays only itself.
MAX_LOOKUPS, MAX_LOOKUPS_PER_TENANT = 32, 4


class Resolver(Protocol):
    """One place to look for names. Called from any thread; may block."""

    def source(self, name: str, tenant_id: str) -> str | None:
        """The source of the adapter, or None if it is not here. Raises SourceError."""


class ResolverSettings(NamedTuple):
    """Resolvers in order; how long a name that was not found stays in the negative cache, and how long one resolver may
    take, in seconds.
    """

    resolvers: Sequence[Resolver] = ()
    negative_ttl_s: float = 30.0
    timeout_s: float = 300.0


class AutoRegistration:
    """One event loop; resolvers and the database are called in threads. `clock` gives seconds."""

    def __init__(
        self,
        registry: Registry,
        store: Reader,
        registry_service: RegistryService,
        failures: FailureBackoff,
        settings: ResolverSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._store = store
        self._registry_service = registry_service
        self._failures = failures
        self._settings = settings
        self._clock = clock
        self._absent_until_s: OrderedDict[Key, float] = OrderedDict()
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="name-resolver")
        self._lookup_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant
        self._tasks = Tasks()
        self._pending: SingleFlight[Key, bool] = SingleFlight(self._tasks)

    def reconfigure(self, settings: ResolverSettings) -> None:
        """Use other resolvers from now on, for all names."""
        self._settings = settings
        self._absent_until_s.clear()

    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:
        """Whether the name is served when this returns. Raises what reading its adapter raises, and AdapterQuarantined
        for a while after a failure.
        """
        key = (tenant_id, name)
        is_free = is_name(name) and name != AUTO and name not in self._registry.aliases.base_names
        if not self._settings.resolvers or not is_free or self._is_absent(key):
            return False
        if key not in self._pending:
            self._failures.check(failure_key(key), f"adapter {name!r}")
        return await asyncio.shield(self._pending.task(key, lambda: self._resolve(key, who)))

    def close(self) -> None:
        self._tasks.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_absent(self, key: Key) -> bool:
        until_s = self._absent_until_s.get(key)
        if until_s is not None and self._clock() >= until_s:
            del self._absent_until_s[key]
            until_s = None
        return until_s is not None

    async def _resolve(self, key: Key, who: str) -> bool:
        with self._failures.recorded_outcome(failure_key(key)):
            is_served = await self._register(key, who)
        if not is_served:
            self._absent_until_s[key] = self._clock() + self._settings.negative_ttl_s
            while len(self._absent_until_s) > MAX_ABSENT:
                self._absent_until_s.popitem(last=False)
        return is_served

    async def _register(self, key: Key, who: str) -> bool:
        tenant_id, name = key
        if not await asyncio.to_thread(self._is_unclaimed, key):
            return False
        for resolver in self._settings.resolvers:
            source = await self._source(resolver, key)
            if source is None:
                continue
            try:
                read = await self._store.load(source, tenant_id)
            except NotFound:
                continue
            if not await asyncio.to_thread(self._is_unclaimed, key):  # the tenant has used the name meanwhile
                return False
            await self._registry_service.load_and_wait(
                LoadRequest(tenant_id, name, source, f"resolver for {who}"), read
            )
            return True
        return False

    async def _source(self, resolver: Resolver, key: Key) -> str | None:
        """The result of one resolver, once the tenant has a free resolver thread."""
        tenant_id, name = key
        slots = self._lookup_slots.setdefault(tenant_id, asyncio.Semaphore(MAX_LOOKUPS_PER_TENANT))
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await slots.acquire()
                lookup = self._threads.submit(resolver.source, name, tenant_id)
                lookup.add_done_callback(partial(_release, asyncio.get_running_loop(), slots))
                return await asyncio.wrap_future(lookup)
        except TimeoutError:
            limit = f"adapters.source_timeout_s ({self._settings.timeout_s:g} s)"
            raise SourceError(f"a resolver did not answer for {name!r} within {limit}; try again later") from None

    def _is_unclaimed(self, key: Key) -> bool:
        """Whether the tenant has never had an adapter of this name, and has no such alias and no load of it."""
        tenant_id, name = key
        if self._registry.aliases.get(name, tenant_id=tenant_id) is not None:
            return False
        if self._registry.catalog.generations(name, tenant_id=tenant_id):
            return False
        last = self._registry.jobs.latest(name, tenant_id=tenant_id)
        return last is None or last.state is State.FAILED


def _release(loop: asyncio.AbstractEventLoop, slots: asyncio.Semaphore, _: Future[str | None]) -> None:
    """A resolver thread has ended, perhaps long after its caller gave up or the loop was closed."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(slots.release)
