"""Adapters in host memory: one read per source, one copy per machine.

In: sources to read, digests to fetch. Out: their facts, and handles to packed adapters. However
many ask at once, each source is read once and each digest is put once; a slow source delays only those
who asked for it: reading happens in threads, a few per source, and nobody waits for another's. The cache is
bounded in bytes (`eviction`); what was evicted comes from the machine's disk or its source again and must
still have the digest it was registered with. What fails is left alone for a while (`quarantine`). Where
packed bytes are put (Ray's object store, a dictionary in tests) is the caller's choice of `put`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from app.deployments.registry.entries import ReadAdapter
from app.deployments.registry.tier_events import StoreEvents
from app.deployments.store.bounded_set import BoundedSet
from app.deployments.store.counts import TierCounts
from app.deployments.store.library import LocatedAdapter
from app.deployments.store.quarantine import Failure, Quarantine
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.isolation.packing import PackedAdapter
from app.engine.adapters.signing.trusted_keys import TrustedKeys
from app.engine.config import EvictionPolicy
from app.engine.errors import AdapterMismatch, AdapterTooLarge, PolyloraError

T = TypeVar("T")
R = TypeVar("R")

#: Adapters read at the same time, from one lane (`Library.lane`) and from all that are remote.
MAX_READERS_PER_LANE = 4
MAX_READERS = 64
#: Lanes that need no network have threads of their own, however many sources hang.
_NEAR_LANES = ("local", "disk", "put")


class Library(Protocol):
    """The part of `AdapterLibrary` that is used here; its methods block."""

    def lane(self, source: str) -> str: ...

    def version(self, source: str) -> str: ...

    def from_source(self, source: str) -> LocatedAdapter: ...

    def from_disk(self, digest: str, source: str) -> PackedAdapter | None: ...

    def pin(self, digests: Collection[str]) -> None: ...


class _Kept(NamedTuple, Generic[T]):
    uri: str
    card: AdapterCard
    handle: T
    signer: str | None


class AdapterStore(Generic[T]):
    """Host cache. All methods run on one event loop; only `read` and `put` leave it."""

    def __init__(
        self,
        library: Library,
        put: Callable[[PackedAdapter], T],
        events: StoreEvents,
        *,
        max_bytes: int,
        policy: EvictionPolicy = "lru",
        counts: TierCounts | None = None,
        quarantine: Quarantine | None = None,
        trusted: TrustedKeys = TrustedKeys(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`put` is called in threads, `events` from any thread; `clock` gives seconds."""
        self._clock = clock
        self._library = library
        self._put = put
        self._far = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="adapter-fetcher")
        self._near = ThreadPoolExecutor(len(_NEAR_LANES) * MAX_READERS_PER_LANE, thread_name_prefix="adapter-reader")
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._kept = BoundedSet(max_bytes, policy)
        self._handles: dict[str, T] = {}
        self._pending: dict[str, asyncio.Task[_Kept[T]]] = {}
        self._begun_s: dict[str, float] = {}  # when the reads that are pending began
        self._wanted: set[str] = set()  # digests being read that somebody waits for
        self._ahead: set[str] = set()  # digests that were read before anybody wanted them
        self._quarantine = quarantine or Quarantine(clock)
        self._trusted = trusted
        self.counts = counts or TierCounts()
        self._events = events

    @property
    def cached_bytes(self) -> int:
        return self._kept.total_bytes

    @property
    def cached_digests(self) -> tuple[str, ...]:
        return tuple(self._kept)

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:
        """Read the adapter at `source`, whatever may be cached of it, and keep it.

        Raises whatever reading raises, and AdapterUntrusted for a tenant that does not trust who signed it.
        """
        uri, card, _, signer = await self._from_source(source)
        if self._trusted.matter:
            self._trusted.check(tenant_id, signer, f"the adapter at {uri}")
        self._quarantine.clear(card.digest)
        return ReadAdapter(uri, card)

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these: once they are here, or on disk, they are not given up for others."""
        self._kept.pin(digests)
        self._library.pin(digests)

    def forget(self, digest: str) -> None:
        """Free the copy: no name means these contents any more."""
        self.lost(digest)

    async def fetch(self, ref: AdapterRef) -> T:
        """The packed adapter with this digest.

        Raises AdapterMismatch if its source now holds something else, whatever reading raises, and
        AdapterQuarantined for a while after either.
        """
        if ref.digest in self._handles:
            self._kept.use(ref.digest)
            if ref.digest in self._ahead:
                self._ahead.discard(ref.digest)
                self.counts.miss("host")
            else:
                self.counts.hit("host")
            return self._handles[ref.digest]
        self.counts.miss("host")
        self._quarantine.check(ref.digest, f"adapter {ref.name!r}")
        self._wanted.add(ref.digest)
        return (await self._load_once(ref)).handle

    async def expect(self, ref: AdapterRef) -> None:
        """Begin what `fetch` will ask for soon. Neither counts nor fails: what goes wrong is for `fetch` to meet."""
        if ref.digest in self._handles or self._quarantine.get(ref.digest) is not None:
            return
        with contextlib.suppress(Exception):
            await self._load_once(ref)

    def failure(self, digest: str) -> Failure | None:
        """Why these contents could not be read the last time that somebody waited for them."""
        return self._quarantine.get(digest)

    def lost(self, digest: str) -> None:
        """A handle no longer resolves (its memory was lost): read the source again on the next fetch."""
        self._ahead.discard(digest)
        if self._kept.remove(digest):
            del self._handles[digest]
            self._report()
            self._events.moved("deleted from host", digest)

    def close(self) -> None:
        for threads in (self._far, self._near):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _load_once(self, ref: AdapterRef) -> _Kept[T]:
        return await self._once(f"digest:{ref.digest}", lambda: self._load(ref))

    async def _once(self, key: str, work: Callable[[], Coroutine[Any, Any, _Kept[T]]]) -> _Kept[T]:
        """Do this work unless it is being done already; everybody who asked gets the result or the error."""
        task = self._pending.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(work(), context=contextvars.Context())
            self._pending[key] = task
            task.add_done_callback(lambda task: self._end(key, task))
        # Shielded: one caller that gives up must not take the result from the others.
        return await asyncio.shield(task)

    def _end(self, key: str, task: asyncio.Task[_Kept[T]]) -> None:
        del self._pending[key]
        self._begun_s.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have given up

    async def _load(self, ref: AdapterRef) -> _Kept[T]:
        """Contents that were registered before. A failure that somebody waited for is remembered for a while."""
        started_s = self._clock()
        try:
            packed = await self._in_lane("disk", lambda: self._library.from_disk(ref.digest, ref.uri))
            if packed is not None:
                kept = await self._keep(LocatedAdapter(ref.uri, packed), self._clock() - started_s)
            else:
                kept = await self._from_source(ref.uri)
                self._events.moved("fetched again", kept.card.digest)
            if kept.card.digest != ref.digest:
                raise AdapterMismatch(
                    f"adapter {ref.name!r} was registered with contents {ref.digest[:12]} but its source now holds "
                    f"{kept.card.digest[:12]}; register it again"
                )
        except Exception as error:
            if ref.digest in self._wanted:
                reason = str(error) if isinstance(error, PolyloraError) else f"internal error ({type(error).__name__})"
                self._quarantine.failed(ref.digest, reason)
                self._events.moved("failed to read", ref.digest)
            raise
        finally:
            is_wanted = ref.digest in self._wanted
            self._wanted.discard(ref.digest)
        if not is_wanted:
            self._ahead.add(ref.digest)
        self._quarantine.clear(ref.digest)
        self._events.moved("loaded to host", ref.digest)
        return kept

    async def _from_source(self, source: str) -> _Kept[T]:
        """One read for all who ask for one version of a source; a local one that was overwritten is another.

        Where nothing tells versions apart, whoever asks when a read has begun waits for the next: what is being read
        may be older than the question.
        """
        asked_s = self._clock()
        lane = self._library.lane(source)
        version = await self._in_lane(lane, lambda: self._library.version(source))
        key = f"source:{version}:{source}"
        while not version and key in self._pending and self._begun_s.get(key, math.inf) <= asked_s:
            await asyncio.wait([self._pending[key]])
        return await self._once(key, lambda: self._read_and_keep(key, lane, source))

    async def _read_and_keep(self, key: str, lane: str, source: str) -> _Kept[T]:
        def read() -> LocatedAdapter:
            self._begun_s[key] = self._clock()
            return self._library.from_source(source)

        started_s = self._clock()
        located = await self._in_lane(lane, read)
        return await self._keep(located, self._clock() - started_s)

    async def _keep(self, located: LocatedAdapter, load_s: float) -> _Kept[T]:
        """Put an adapter into host memory unless it is there, and let others go for it."""
        card = located.packed.card
        if card.digest not in self._handles:
            if card.size_bytes > self._kept.max_bytes:
                raise AdapterTooLarge(
                    f"the adapter at {located.uri} has {card.size_bytes} bytes but adapters.host_cache_bytes is "
                    f"{self._kept.max_bytes}; raise it"
                )
            handle = await self._in_lane("put", lambda: self._put(located.packed))
            if card.digest not in self._handles:
                evicted = self._kept.add(card.digest, card.size_bytes, load_s)
                if evicted is None:
                    raise AdapterTooLarge(
                        f"the adapter at {located.uri} has {card.size_bytes} bytes, but pinned adapters hold "
                        f"{self._kept.pinned_bytes} of adapters.host_cache_bytes {self._kept.max_bytes}; raise it, or "
                        "unpin an adapter"
                    )
                self._handles[card.digest] = handle
                for digest in evicted:
                    del self._handles[digest]
                    self._ahead.discard(digest)
                    self._events.moved("deleted from host", digest)
                self.counts.evicted("host", len(evicted))
                self._report()
        return _Kept(located.uri, card, self._handles[card.digest], located.signer)

    async def _in_lane(self, lane: str, work: Callable[[], R]) -> R:
        """Run blocking work in a thread, with at most a few at a time of one lane."""
        limit = self._lanes.setdefault(lane, asyncio.Semaphore(MAX_READERS_PER_LANE))
        threads = self._near if lane in _NEAR_LANES else self._far
        async with limit:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _report(self) -> None:
        self.counts.holds("host", self._kept.total_bytes, len(self._kept))
