"""The host cache: adapters in host memory, one read per source and one copy per machine.

However many callers of a tenant ask at once, each source is read once, and each digest is put once. Reading runs in
threads, a few per source and tenant, so a slow source delays only its own callers. The cache is bounded in bytes; an
evicted adapter is read again from disk or its source, and must still have its registered digest. Tenants with equal
contents share a copy, so it has no text settings, description or metadata: those are in each tenant's registration.
Failures back off (`failure_backoff`), and a download that no caller waits for is abandoned. `put` decides where packed
bytes go: Ray's object store, or a dictionary in tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from app.deployments.registry.jobs.failure_backoff import Failure, FailureBackoff, failure_reason
from app.deployments.registry.models import ReadAdapter
from app.deployments.registry.tier_events import TierEvents
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.store.adapter_reader import AdapterReader, LocatedAdapter
from app.deployments.store.bytes_bounded_cache import BytesBoundedCache
from app.deployments.store.reader_pool import ReadDemand, ReaderPool
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.combining.combination import is_combination, parse_combination
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.signing.trusted_keys import TrustedKeys
from app.engine.config import EvictionPolicy
from app.engine.errors import (
    AdapterMismatch,
    AdapterQuarantined,
    AdapterTooLarge,
    AdapterUntrusted,
    CombinationError,
    FetchAbandoned,
)

T = TypeVar("T")

#: Exceptions that are kept for callers that wait for a failed read.
MAX_ERRORS = 1024


class _CachedAdapter(NamedTuple, Generic[T]):
    uri: str
    card: AdapterCard
    handle: T
    signer: str | None
    is_new: bool = False  # whether it was added by this read


def refuse_combinations(handle: object) -> PackedAdapter:  # noqa: ARG001
    """The `get` of a store that supports no combinations."""
    raise CombinationError("this store cannot combine adapters")


class HostAdapterCache(Generic[T]):
    """All methods run on one event loop; only the reader, `put` and `get` run in threads."""

    def __init__(
        self,
        reader: AdapterReader,
        put: Callable[[PackedAdapter], T],
        events: TierEvents,
        *,
        max_bytes: int,
        policy: EvictionPolicy = "lru",
        counts: TierCounters | None = None,
        backoff: FailureBackoff | None = None,
        trusted: TrustedKeys = TrustedKeys(),  # noqa: B008  (frozen)
        get: Callable[[T], PackedAdapter] = refuse_combinations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`get` gives a handle's adapter, to be combined; it blocks. `clock` gives seconds."""
        self._clock = clock
        self._reader = reader
        self._put = put
        self._get = get
        self._readers = ReaderPool()
        self._demand = ReadDemand(clock, self._abandon)
        self._cache = BytesBoundedCache(max_bytes, policy)
        self._handles: dict[str, T] = {}
        self._pending: dict[str, asyncio.Task[_CachedAdapter[T]]] = {}
        self._read_began_s: dict[str, float] = {}  # key of a pending read -> when it began
        self._requested: dict[str, str] = {}  # `_error_key` of a requested read -> source
        self._errors: dict[str, Exception] = {}  # `_error_key` -> error, for the first caller that asks again
        self._tasks = Tasks()
        self._prefetched: set[str] = set()  # digests that were read ahead and not requested since
        self._backoff = backoff or FailureBackoff(clock)
        self._trusted = trusted
        self.counts = counts or TierCounters()
        self._events = events

    @property
    def cached_digests(self) -> tuple[str, ...]:
        return tuple(self._cache)

    def host(self, source: str) -> str:
        """The host or bucket of a source, or one name for all local folders."""
        return self._reader.host(source)

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:
        """Read the adapter at `source` again, whatever is cached, and keep it.

        Raises whatever reading raises, and AdapterUntrusted for a tenant that does not trust the signer.
        """
        with self._demand.waits_for(source):
            cached = await self._from_source(source, tenant_id, lambda: True)
        uri, card = cached.uri, cached.card
        if self._trusted.is_enabled and not is_combination(source):  # its parts were registered, so they are trusted
            try:
                self._trusted.check(tenant_id, cached.signer, f"the adapter at {uri}")
            except AdapterUntrusted:
                if cached.is_new:
                    self.invalidate(card.digest)
                raise
        self._backoff.clear(_error_key(card.digest, uri))
        return ReadAdapter(uri, card)

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these: once in memory or on disk, they are not evicted."""
        self._cache.pin(digests)
        self._reader.pin(digests)

    def reconfigure(
        self, reader: AdapterReader, *, max_bytes: int, policy: EvictionPolicy, trusted: TrustedKeys
    ) -> None:
        """Use another reader and other limits from now on; running reads end with the former reader."""
        former, self._reader, self._trusted = self._reader, reader, trusted
        for digest in self._cache.set_limit(max_bytes, policy):
            del self._handles[digest]
            self._prefetched.discard(digest)
            self._events.on_move("deleted from host", digest)
        self._report()
        self._tasks.start(self._close_when_idle(former, tuple(self._pending.values())))

    async def fetch(self, ref: AdapterRef) -> T:
        """The handle of the adapter with this digest.

        Raises AdapterMismatch if its source now has other contents, whatever reading raises, and AdapterQuarantined for
        a while after either.
        """
        with self._demand.waits_for(ref.uri):
            handle = self._cached_handle(ref)
            return (await asyncio.shield(self._request(ref))).handle if handle is None else handle

    async def try_fetch(self, ref: AdapterRef, wait_s: float, *, again: bool = False) -> T | None:
        """Like `fetch`, but None if the adapter is not here after `wait_s`; the read goes on as long as callers ask.

        `again`: this caller has received None before.
        """
        if (handle := self._cached_handle(ref, is_counted=not again)) is not None:
            return handle
        try:
            task = self._request(ref)
        except AdapterQuarantined:
            if again and (error := self._errors.pop(_error_key(ref.digest, ref.uri), None)) is not None:
                raise error from None  # the caller waited for this very read: raise its cause once
            raise
        self._demand.ask(ref.uri)
        await asyncio.wait([task], timeout=wait_s)
        return task.result().handle if task.done() else None

    async def prefetch(self, ref: AdapterRef) -> None:
        """Start the read that `fetch` will need soon. Neither counts nor raises: `fetch` meets the failure."""
        if ref.digest in self._handles or self.failure(ref) is not None:
            return
        self._demand.ask(ref.uri)
        with contextlib.suppress(Exception):
            await asyncio.shield(self._read_once(ref))

    def failure(self, ref: AdapterRef) -> Failure | None:
        """Why the last requested read of these contents failed."""
        return self._backoff.get(_error_key(ref.digest, ref.uri))

    def invalidate(self, digest: str) -> None:
        """Drop a handle that no longer resolves, or whose contents no name means."""
        self._prefetched.discard(digest)
        if self._cache.remove(digest):
            del self._handles[digest]
            self._report()
            self._events.on_move("deleted from host", digest)

    def close(self) -> None:
        self._tasks.cancel()
        self._demand.close()
        self._readers.close()

    def _cached_handle(self, ref: AdapterRef, *, is_counted: bool = True) -> T | None:
        """The cached handle, counted as a hit; None, counted as a miss."""
        handle = self._handles.get(ref.digest)
        if handle is None:
            if is_counted:
                self.counts.miss("host")
            return None
        self._cache.record_hit(ref.digest, ref.tenant_id)
        was_prefetched = ref.digest in self._prefetched
        self._prefetched.discard(ref.digest)
        if was_prefetched and is_counted:
            self.counts.miss("host")
        elif is_counted:
            self.counts.hit("host")
        return handle

    def _request(self, ref: AdapterRef) -> asyncio.Task[_CachedAdapter[T]]:
        """Start the read for a caller that waits. Raises AdapterQuarantined."""
        key = _error_key(ref.digest, ref.uri)
        self._backoff.check(key, f"adapter {ref.name!r}")
        self._requested[key] = ref.uri
        return self._read_once(ref)

    def _read_once(self, ref: AdapterRef) -> asyncio.Task[_CachedAdapter[T]]:
        return self._single_flight(f"digest:{_error_key(ref.digest, ref.uri)}", lambda: self._load(ref))

    def _record_error(self, key: str, error: Exception) -> None:
        self._errors[key] = error
        if len(self._errors) > MAX_ERRORS:
            del self._errors[next(iter(self._errors))]

    def _abandon(self, source: str) -> None:
        """End a read that no caller waits for; its failure is not recorded."""
        self._requested = {key: uri for key, uri in self._requested.items() if uri != source}
        self._reader.abandon(source)

    async def _close_when_idle(self, reader: AdapterReader, reads: Sequence[asyncio.Task[_CachedAdapter[T]]]) -> None:
        if reads:
            await asyncio.wait(reads)
        await asyncio.to_thread(reader.close)

    def _single_flight(
        self, key: str, work: Callable[[], Coroutine[Any, Any, _CachedAdapter[T]]]
    ) -> asyncio.Task[_CachedAdapter[T]]:
        """Start this work unless it is running. Callers shield the task: others may wait for it too."""
        task = self._pending.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(work(), context=contextvars.Context())
            self._pending[key] = task
            task.add_done_callback(lambda task: self._end(key, task))
        return task

    def _end(self, key: str, task: asyncio.Task[_CachedAdapter[T]]) -> None:
        del self._pending[key]
        self._read_began_s.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have given up

    async def _load(self, ref: AdapterRef) -> _CachedAdapter[T]:
        """Read contents that were registered before. The failure of a requested read is recorded."""
        started_s, key = self._clock(), _error_key(ref.digest, ref.uri)
        try:
            packed = None
            if not is_combination(ref.uri):  # combinations are not kept on disk
                packed = await self._readers.run(
                    "disk", lambda: self._reader.from_disk(ref.digest, ref.uri), ref.tenant_id
                )
            if packed is not None:
                cached = await self._keep(LocatedAdapter(ref.uri, packed), self._clock() - started_s, ref.tenant_id)
            else:
                cached = await self._from_source(ref.uri, ref.tenant_id, lambda: key in self._requested)
                self._events.on_move("fetched again", cached.card.digest)
            if cached.card.digest != ref.digest:
                raise AdapterMismatch(
                    f"adapter {ref.name!r} was registered with contents {ref.digest[:12]} but its source now holds "
                    f"{cached.card.digest[:12]}; register it again"
                )
        except Exception as error:
            if key in self._requested and not isinstance(error, CombinationError):
                self._backoff.record_failure(key, failure_reason(error))
                self._events.on_move("failed to read", ref.digest)
                self._record_error(key, error)
            raise
        finally:
            is_requested = self._requested.pop(key, None) is not None
            self._demand.forget(ref.uri)
        if not is_requested:
            self._prefetched.add(ref.digest)
        self._backoff.clear(key)
        self._events.on_move("loaded to host", ref.digest)
        return cached

    async def _from_source(self, source: str, tenant_id: str, is_wanted: Callable[[], bool]) -> _CachedAdapter[T]:
        """One read serves a tenant's callers with one version of a source; an overwritten local source is another
        version. Tenants share no read: it would wait behind the other reads of the tenant that asked first.

        Without versions, a caller that comes after a read has begun waits for the next one: the present read may be
        older than the request. A read that is abandoned just as the caller comes is begun again if it `is_wanted`.
        """
        if is_combination(source):
            return await asyncio.shield(
                self._single_flight(f"source::{source}", lambda: self._make_combination(source, tenant_id))
            )
        requested_s = self._clock()
        lane = self._reader.lane(source)
        version = await self._readers.locate(lane, partial(self._reader.version, source, tenant_id), tenant_id)
        key = f"source:{version}:{tenant_id}:{source}"
        while not version and key in self._pending and self._read_began_s.get(key, math.inf) <= requested_s:
            await asyncio.wait([self._pending[key]])
        while True:
            read = self._single_flight(key, lambda: self._read_and_keep(key, lane, source, tenant_id))
            try:
                return await asyncio.shield(read)
            except FetchAbandoned:
                if not is_wanted():
                    raise

    async def _make_combination(self, source: str, tenant_id: str) -> _CachedAdapter[T]:
        """Combine parts that are fetched like any other adapter. Raises what fetching raises."""
        started_s, combination = self._clock(), parse_combination(source)
        parts = await asyncio.gather(*(self.fetch(part.ref) for part in combination.parts))
        reader = self._reader
        packed = await self._readers.run(
            "combine", lambda: reader.combine(combination, [self._get(part) for part in parts]), tenant_id
        )
        return await self._keep(LocatedAdapter(source, packed), self._clock() - started_s, tenant_id)

    async def _read_and_keep(self, key: str, lane: str, source: str, tenant_id: str) -> _CachedAdapter[T]:
        reader = self._reader

        def read() -> LocatedAdapter:
            self._read_began_s[key] = self._clock()
            return reader.from_source(source, tenant_id)

        started_s = self._clock()
        with self._demand.reads(source):
            located = await self._readers.run(lane, read, tenant_id, self._reader.host(source))
        return await self._keep(located, self._clock() - started_s, tenant_id)

    async def _keep(self, located: LocatedAdapter, load_s: float, tenant_id: str) -> _CachedAdapter[T]:
        """Put an adapter into host memory unless it is there, and evict others for it."""
        card, is_new = located.packed.card, False
        if card.digest not in self._handles:
            if card.size_bytes > self._cache.max_bytes:
                raise AdapterTooLarge(
                    f"the adapter at {located.uri} has {card.size_bytes} bytes but adapters.host_cache_bytes is "
                    f"{self._cache.max_bytes}; raise it"
                )
            handle = await self._readers.run("put", lambda: self._put(located.packed.contents), tenant_id)
            if card.digest not in self._handles:
                evicted = self._cache.add(card.digest, card.size_bytes, load_s, tenant_id)
                if evicted is None:
                    raise AdapterTooLarge(
                        f"the adapter at {located.uri} has {card.size_bytes} bytes, but pinned adapters take "
                        f"{self._cache.pinned_bytes} of adapters.host_cache_bytes {self._cache.max_bytes}; raise it, "
                        "or unpin an adapter"
                    )
                self._handles[card.digest], is_new = handle, True
                for digest in evicted:
                    del self._handles[digest]
                    self._prefetched.discard(digest)
                    self._events.on_move("deleted from host", digest)
                self.counts.record_evictions("host", len(evicted))
                self._report()
        return _CachedAdapter(located.uri, card, self._handles[card.digest], located.signer, is_new)

    def _report(self) -> None:
        self.counts.set_size("host", self._cache.total_bytes, len(self._cache), self._cache.max_bytes)


def _error_key(digest: str, uri: str) -> str:
    """The key of contents at one source: another source of the same contents may work while this one fails."""
    return f"{digest} {uri}"
