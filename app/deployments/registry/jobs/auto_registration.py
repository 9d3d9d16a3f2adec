"""Names that nobody has registered: they are looked for when a request first uses them, and registered.

In: a name that an ingress does not know, and a tenant. Out: whether it is served now. Rule: each name is looked for
once however many ask, and what was not found is not looked for again for a while. A name that was an adapter's or is an
alias's, that is being loaded or was unloaded before it was loaded, is its tenant's to decide about, and left alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from app.deployments.registry.feed.view import Key
from app.deployments.registry.jobs.load_jobs import Reader
from app.deployments.registry.models import AUTO, LoadRequest, State, is_name
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.engine.errors import AdapterQuarantined, NotFound, PolyloraError, ServerOverloaded, SourceError

#: Names that are remembered as not found; beyond them the oldest is forgotten.
MAX_ABSENT = 10_000
#: Functions and file systems that are asked at a time, for all tenants and for one: one whose resolver hangs holds up
#: itself.
MAX_LOOKERS, MAX_LOOKERS_PER_TENANT = 32, 4


class Resolver(Protocol):
    """One place to look for names. Called from any thread; may block."""

    def source(self, name: str, tenant_id: str) -> str | None:
        """Where the adapter would be; None: not here. Raises SourceError."""


class Failures(Protocol):
    """`FailureBackoff`: names whose adapter could not be read a moment ago."""

    def check(self, key: str, what: str) -> None: ...

    def failed(self, key: str, reason: str) -> object: ...

    def clear(self, key: str) -> None: ...


class SourcePaths(NamedTuple):
    """Where names are looked for, in order; how long one that was not found is not looked for again, and how long one
    resolver may take, in seconds."""

    resolvers: Sequence[Resolver] = ()
    again_s: float = 30.0
    timeout_s: float = 300.0


class AutoRegistration:
    """One event loop; resolvers and the database are called in threads. `clock` gives seconds."""

    def __init__(
        self,
        registry: Registry,
        store: Reader,
        names: RegistryService,
        failures: Failures,
        places: SourcePaths,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._store = store
        self._names = names
        self._failures = failures
        self._places = places
        self._clock = clock
        self._absent_until_s: OrderedDict[Key, float] = OrderedDict()
        self._threads = ThreadPoolExecutor(MAX_LOOKERS, thread_name_prefix="name-resolver")
        self._lookers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant
        self._tasks = Tasks()
        self._pending: SingleFlight[Key, bool] = SingleFlight(self._tasks)

    def use(self, places: SourcePaths) -> None:
        """Look in other places from now on, for all names."""
        self._places = places
        self._absent_until_s.clear()

    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:
        """Whether requests for the name are served when this returns. Raises what reading its adapter raises, and
        AdapterQuarantined for a while after that."""
        key = (tenant_id, name)
        is_free = is_name(name) and name != AUTO and name not in self._names.reserved_names
        if not self._places.resolvers or not is_free or self._is_absent(key):
            return False
        if key not in self._pending:
            self._failures.check(words(key), f"adapter {name!r}")
        return await asyncio.shield(self._pending.task(key, lambda: self._resolve(key, who)))

    def close(self) -> None:
        """Look for nothing any more."""
        self._tasks.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_absent(self, key: Key) -> bool:
        until_s = self._absent_until_s.get(key)
        if until_s is not None and self._clock() >= until_s:
            del self._absent_until_s[key]
            until_s = None
        return until_s is not None

    async def _resolve(self, key: Key, who: str) -> bool:
        with remembered(self._failures, key):
            is_served = await self._register(key, who)
        if not is_served:
            self._absent_until_s[key] = self._clock() + self._places.again_s
            while len(self._absent_until_s) > MAX_ABSENT:
                self._absent_until_s.popitem(last=False)
        return is_served

    async def _register(self, key: Key, who: str) -> bool:
        tenant_id, name = key
        if not await asyncio.to_thread(self._is_nobodys, key):
            return False
        for resolver in self._places.resolvers:
            source = await self._source(resolver, key)
            if source is None:
                continue
            try:
                read = await self._store.load(source, tenant_id)
            except NotFound:
                continue
            if not await asyncio.to_thread(self._is_nobodys, key):  # somebody has decided about it meanwhile
                return False
            await self._names.load_and_wait(LoadRequest(tenant_id, name, source, f"resolver for {who}"), read)
            return True
        return False

    async def _source(self, resolver: Resolver, key: Key) -> str | None:
        """What one resolver says, as soon as its tenant has one of its threads free."""
        tenant_id, name = key
        lookers = self._lookers.setdefault(tenant_id, asyncio.Semaphore(MAX_LOOKERS_PER_TENANT))
        try:
            async with asyncio.timeout(self._places.timeout_s):
                await lookers.acquire()
                asked = self._threads.submit(resolver.source, name, tenant_id)
                asked.add_done_callback(partial(_release, asyncio.get_running_loop(), lookers))
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            limit = f"adapters.source_timeout_s ({self._places.timeout_s:g} s)"
            raise SourceError(f"a resolver said nothing of {name!r} in {limit}; ask again later") from None

    def _is_nobodys(self, key: Key) -> bool:
        """Whether the tenant has never had an adapter of this name, has no such alias, and loads none."""
        tenant_id, name = key
        if self._registry.aliases.get(name, tenant_id=tenant_id) is not None:
            return False
        if self._registry.catalog.generations(name, tenant_id=tenant_id):
            return False
        last = self._registry.jobs.latest(name, tenant_id=tenant_id)
        return last is None or last.state is State.FAILED


def _release(loop: asyncio.AbstractEventLoop, lookers: asyncio.Semaphore, _: Future[str | None]) -> None:
    """A thread has ended, perhaps long after nobody waited for it any more, or after the loop."""
    with suppress(RuntimeError):  # the loop is closed: nobody will look again
        loop.call_soon_threadsafe(lookers.release)


def words(key: Key) -> str:
    """A name's key among `Failures`."""
    return "/".join(key)


@contextmanager
def remembered(failures: Failures, key: Key) -> Iterator[None]:
    """An attempt at a name, whose end is noted: a failure of the adapter's, or none any more."""
    try:
        yield
    except (ServerOverloaded, AdapterQuarantined):  # nothing is wrong with the adapter
        raise
    except Exception as error:
        is_ours = isinstance(error, PolyloraError)
        failures.failed(words(key), str(error) if is_ours else f"internal error ({type(error).__name__})")
        raise
    failures.clear(words(key))
