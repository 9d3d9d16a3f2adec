"""Adapters in host memory: one read per source, one copy per machine.

In: sources to read, digests to fetch. Out: their facts, and handles to packed adapters. However many ask at once, each
source is read once and each digest is put once; a slow source delays only those who asked for it: reading happens in
threads, a few per source, and nobody waits for another's. The cache is bounded in bytes (`eviction`); what was evicted
comes from the machine's disk or its source again and must still have the digest it was registered with. What fails is
left alone for a while (`quarantine`), and a download that nobody asks about any more is given up. Where packed bytes
are put (Ray's object store, a dictionary in tests) is the caller's choice of `put`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from app.deployments.registry.models import ReadAdapter
from app.deployments.registry.tier_events import TierEvents
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.store.adapter_reader import AdapterReader, LocatedAdapter
from app.deployments.store.bytes_bounded_cache import BytesBoundedCache
from app.deployments.store.failure_backoff import Failure, FailureBackoff
from app.deployments.store.reader_pool import ReadDemand, ReaderPool
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.combining.combination import Combination, is_composition, read_composition
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.signing.trusted_keys import TrustedKeys
from app.engine.config import EvictionPolicy
from app.engine.errors import (
    AdapterMismatch,
    AdapterQuarantined,
    AdapterTooLarge,
    AdapterUntrusted,
    CombinationError,
    PolyloraError,
)

T = TypeVar("T")

#: Contents whose last failure is remembered as it was.
MAX_ERRORS = 1024


class _Kept(NamedTuple, Generic[T]):
    uri: str
    card: AdapterCard
    handle: T
    signer: str | None
    is_new: bool = False  # it was not here before


#: Makes a composition's adapter of its parts' handles, in their order; it blocks. Raises CombinationError.
Compose = Callable[[Combination, Sequence[T]], PackedAdapter]


def no_compositions(composition: Combination, parts: Sequence[object]) -> PackedAdapter:  # noqa: ARG001
    """The `Compose` of a store that makes none."""
    raise CombinationError(f"this store combines no adapters: {composition.name!r} cannot be made")


class HostAdapterCache(Generic[T]):
    """Host cache. All methods run on one event loop; only `read` and `put` leave it."""

    def __init__(
        self,
        library: AdapterReader,
        put: Callable[[PackedAdapter], T],
        events: TierEvents,
        *,
        max_bytes: int,
        policy: EvictionPolicy = "lru",
        counts: TierCounters | None = None,
        quarantine: FailureBackoff | None = None,
        trusted: TrustedKeys = TrustedKeys(),  # noqa: B008  (frozen)
        compose: Compose[T] = no_compositions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`put` and `combine` are called in threads, `events` from any thread; `clock` gives seconds."""
        self._clock = clock
        self._library = library
        self._put = put
        self._compose = compose
        self._readers = ReaderPool()
        self._demand = ReadDemand(clock, self._abandon)
        self._kept = BytesBoundedCache(max_bytes, policy)
        self._handles: dict[str, T] = {}
        self._pending: dict[str, asyncio.Task[_Kept[T]]] = {}
        self._begun_s: dict[str, float] = {}  # when the reads that are pending began
        self._wanted: dict[str, str] = {}  # what is being read that somebody asked for (`_place`), and its source
        self._errors: dict[str, Exception] = {}  # what made it fail, for the first who asks again
        self._tasks = Tasks()
        self._ahead: set[str] = set()  # digests that were read before anybody wanted them
        self._quarantine = quarantine or FailureBackoff(clock)
        self._trusted = trusted
        self.counts = counts or TierCounters()
        self._events = events

    @property
    def cached_bytes(self) -> int:
        return self._kept.total_bytes

    @property
    def cached_digests(self) -> tuple[str, ...]:
        return tuple(self._kept)

    def host(self, source: str) -> str:
        """What may hang together: the host or bucket of a source, or all local folders."""
        return self._library.host(source)

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:
        """Read the adapter at `source`, whatever may be cached of it, and keep it.

        Raises whatever reading raises, and AdapterUntrusted for a tenant that does not trust who signed it.
        """
        with self._demand.waits_for(source):
            storage = await self._from_source(source, tenant_id)
        uri, card = storage.uri, storage.card
        if self._trusted.matter and not is_composition(source):  # its parts were registered, so they are trusted
            try:
                self._trusted.check(tenant_id, storage.signer, f"the adapter at {uri}")
            except AdapterUntrusted:
                if storage.is_new:
                    self.forget(card.digest)
                raise
        self._quarantine.clear(_place(card.digest, uri))
        return ReadAdapter(uri, card)

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these: once they are here, or on disk, they are not given up for others."""
        self._kept.pin(digests)
        self._library.pin(digests)

    def use(self, library: AdapterReader, *, max_bytes: int, policy: EvictionPolicy, trusted: TrustedKeys) -> None:
        """Read with another library, and keep within other limits, from now on; reads under way end as they began."""
        former, self._library, self._trusted = self._library, library, trusted
        for digest in self._kept.limit(max_bytes, policy):
            del self._handles[digest]
            self._ahead.discard(digest)
            self._events.moved("deleted from host", digest)
        self._report()
        self._tasks.start(self._close_when_idle(former, tuple(self._pending.values())))

    def forget(self, digest: str) -> None:
        """Free the copy: no name means these contents any more."""
        self.lost(digest)

    async def fetch(self, ref: AdapterRef) -> T:
        """The packed adapter with this digest.

        Raises AdapterMismatch if its source now holds something else, whatever reading raises, and
        AdapterQuarantined for a while after either.
        """
        with self._demand.waits_for(ref.uri):
            handle = self._found(ref)
            return (await asyncio.shield(self._begin(ref))).handle if handle is None else handle

    async def fetch_soon(self, ref: AdapterRef, wait_s: float, *, again: bool = False) -> T | None:
        """As `fetch`, but None if it is not here after `wait_s`: it is being read for as long as somebody asks.

        `again`: this caller has been told so before.
        """
        if (handle := self._found(ref, is_counted=not again)) is not None:
            return handle
        try:
            task = self._begin(ref)
        except AdapterQuarantined:
            if again and (error := self._errors.pop(_place(ref.digest, ref.uri), None)) is not None:
                raise error from None  # it waited for this very read; one says why
            raise
        self._demand.ask(ref.uri)
        await asyncio.wait([task], timeout=wait_s)
        return task.result().handle if task.done() else None

    async def expect(self, ref: AdapterRef) -> None:
        """Begin what `fetch` will ask for soon. Neither counts nor fails: what goes wrong is for `fetch` to meet."""
        if ref.digest in self._handles or self.failure(ref) is not None:
            return
        self._demand.ask(ref.uri)
        with contextlib.suppress(Exception):
            await asyncio.shield(self._read_once(ref))

    def failure(self, ref: AdapterRef) -> Failure | None:
        """Why these contents could not be read from there the last time that somebody waited for them."""
        return self._quarantine.get(_place(ref.digest, ref.uri))

    def lost(self, digest: str) -> None:
        """A handle no longer resolves (its memory was lost): read the source again on the next fetch."""
        self._ahead.discard(digest)
        if self._kept.remove(digest):
            del self._handles[digest]
            self._report()
            self._events.moved("deleted from host", digest)

    def close(self) -> None:
        self._tasks.cancel()
        self._demand.close()
        self._readers.close()

    def _found(self, ref: AdapterRef, *, is_counted: bool = True) -> T | None:
        """What is here, as a use of it; None, as a miss, if it is not."""
        handle = self._handles.get(ref.digest)
        if handle is None:
            if is_counted:
                self.counts.miss("host")
            return None
        self._kept.use(ref.digest, ref.tenant_id)
        was_ahead = ref.digest in self._ahead
        self._ahead.discard(ref.digest)
        if was_ahead and is_counted:
            self.counts.miss("host")
        elif is_counted:
            self.counts.hit("host")
        return handle

    def _begin(self, ref: AdapterRef) -> asyncio.Task[_Kept[T]]:
        """Somebody wants this now. Raises AdapterQuarantined."""
        place = _place(ref.digest, ref.uri)
        self._quarantine.check(place, f"adapter {ref.name!r}")
        self._wanted[place] = ref.uri
        return self._read_once(ref)

    def _read_once(self, ref: AdapterRef) -> asyncio.Task[_Kept[T]]:
        return self._once(f"digest:{_place(ref.digest, ref.uri)}", lambda: self._load(ref))

    def _remember(self, place: str, error: Exception) -> None:
        self._errors[place] = error
        if len(self._errors) > MAX_ERRORS:
            del self._errors[next(iter(self._errors))]

    def _abandon(self, source: str) -> None:
        """Nobody asks about a read any more: it is to end, and what comes of it is nobody's failure."""
        self._wanted = {place: uri for place, uri in self._wanted.items() if uri != source}
        self._library.abandon(source)

    async def _close_when_idle(self, library: AdapterReader, reads: Sequence[asyncio.Task[_Kept[T]]]) -> None:
        if reads:
            await asyncio.wait(reads)
        await asyncio.to_thread(library.close)

    def _once(self, key: str, work: Callable[[], Coroutine[Any, Any, _Kept[T]]]) -> asyncio.Task[_Kept[T]]:
        """Do this work unless it is being done already. Whoever waits shields it: others may wait, too."""
        task = self._pending.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(work(), context=contextvars.Context())
            self._pending[key] = task
            task.add_done_callback(lambda task: self._end(key, task))
        return task

    def _end(self, key: str, task: asyncio.Task[_Kept[T]]) -> None:
        del self._pending[key]
        self._begun_s.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have given up

    async def _load(self, ref: AdapterRef) -> _Kept[T]:
        """Contents that were registered before. A failure that somebody waited for is remembered for a while."""
        started_s, place = self._clock(), _place(ref.digest, ref.uri)
        try:
            packed = None
            if not is_composition(ref.uri):  # made again rather than kept on disk
                packed = await self._readers.run("disk", lambda: self._library.from_disk(ref.digest, ref.uri))
            if packed is not None:
                storage = await self._keep(LocatedAdapter(ref.uri, packed), self._clock() - started_s, ref.tenant_id)
            else:
                storage = await self._from_source(ref.uri, ref.tenant_id)
                self._events.moved("fetched again", storage.card.digest)
            if storage.card.digest != ref.digest:
                raise AdapterMismatch(
                    f"adapter {ref.name!r} was registered with contents {ref.digest[:12]} but its source now holds "
                    f"{storage.card.digest[:12]}; register it again"
                )
        except Exception as error:
            if place in self._wanted and not isinstance(error, CombinationError):  # whoever asks again is told
                reason = str(error) if isinstance(error, PolyloraError) else f"internal error ({type(error).__name__})"
                self._quarantine.failed(place, reason)
                self._events.moved("failed to read", ref.digest)
                self._remember(place, error)
            raise
        finally:
            is_wanted = self._wanted.pop(place, None) is not None
            self._demand.forget(ref.uri)
        if not is_wanted:
            self._ahead.add(ref.digest)
        self._quarantine.clear(place)
        self._events.moved("loaded to host", ref.digest)
        return storage

    async def _from_source(self, source: str, tenant_id: str) -> _Kept[T]:
        """One read for all who ask for one version of a source; a local one that was overwritten is another.

        Where nothing tells versions apart, whoever asks when a read has begun waits for the next: what is being read
        may be older than the question.
        """
        if is_composition(source):
            return await asyncio.shield(self._once(f"source::{source}", lambda: self._made(source, tenant_id)))
        asked_s = self._clock()
        lane = self._library.lane(source)
        version = await self._readers.run(lane, lambda: self._library.version(source))
        key = f"source:{version}:{source}"
        while not version and key in self._pending and self._begun_s.get(key, math.inf) <= asked_s:
            await asyncio.wait([self._pending[key]])
        return await asyncio.shield(self._once(key, lambda: self._read_and_keep(key, lane, source, tenant_id)))

    async def _made(self, source: str, tenant_id: str) -> _Kept[T]:
        """A derived adapter, of parts that are fetched like any other. Raises what fetching one raises."""
        started_s, composition = self._clock(), read_composition(source)
        parts = await asyncio.gather(*(self.fetch(part.ref) for part in composition.parts))
        packed = await self._readers.run("compose", lambda: self._compose(composition, parts))
        return await self._keep(LocatedAdapter(source, packed), self._clock() - started_s, tenant_id)

    async def _read_and_keep(self, key: str, lane: str, source: str, tenant_id: str) -> _Kept[T]:
        library = self._library

        def read() -> LocatedAdapter:
            self._begun_s[key] = self._clock()
            return library.from_source(source)

        started_s = self._clock()
        with self._demand.reads(source):
            located = await self._readers.run(lane, read, self._library.host(source))
        return await self._keep(located, self._clock() - started_s, tenant_id)

    async def _keep(self, located: LocatedAdapter, load_s: float, tenant_id: str) -> _Kept[T]:
        """Put an adapter into host memory unless it is there, and let others go for it."""
        card, is_new = located.packed.card, False
        if card.digest not in self._handles:
            if card.size_bytes > self._kept.max_bytes:
                raise AdapterTooLarge(
                    f"the adapter at {located.uri} has {card.size_bytes} bytes but adapters.host_cache_bytes is "
                    f"{self._kept.max_bytes}; raise it"
                )
            handle = await self._readers.run("put", lambda: self._put(located.packed))
            if card.digest not in self._handles:
                evicted = self._kept.add(card.digest, card.size_bytes, load_s, tenant_id)
                if evicted is None:
                    raise AdapterTooLarge(
                        f"the adapter at {located.uri} has {card.size_bytes} bytes, but pinned adapters hold "
                        f"{self._kept.pinned_bytes} of adapters.host_cache_bytes {self._kept.max_bytes}; raise it, or "
                        "unpin an adapter"
                    )
                self._handles[card.digest], is_new = handle, True
                for digest in evicted:
                    del self._handles[digest]
                    self._ahead.discard(digest)
                    self._events.moved("deleted from host", digest)
                self.counts.evicted("host", len(evicted))
                self._report()
        return _Kept(located.uri, card, self._handles[card.digest], located.signer, is_new)

    def _report(self) -> None:
        self.counts.holds("host", self._kept.total_bytes, len(self._kept))


def _place(digest: str, uri: str) -> str:
    """Contents at one source: where another tenant has the same ones, that source may fail and this one not."""
    return f"{digest} {uri}"
