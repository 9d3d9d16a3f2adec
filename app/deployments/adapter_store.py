"""Adapters in host memory: one read per source, one copy per machine.

In: names to register, digests to fetch. Out: catalog entries, and handles to packed adapters. However
many ask at once, each source is read once and each digest is put once; a slow source delays only those
who asked for it, because reading happens in threads. The cache is bounded in bytes, least recently used
out; what was evicted is read again and must still have the digest it was registered with. Where packed
bytes are put (Ray's object store, a dictionary in tests) is the caller's choice of `put`.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from app.config import NAME_PATTERN
from app.deployments.quarantine import Quarantine
from app.deployments.registry.catalog import Catalog
from app.deployments.registry.entries import CatalogEntry
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.packing import PackedAdapter
from app.engine.errors import AdapterMismatch, AdapterTooLarge, InvalidRequest, PolyloraError

T = TypeVar("T")

#: Sources read at the same time.
MAX_READERS = 4


class LocatedAdapter(NamedTuple):
    """A read adapter and the canonical place it came from."""

    uri: str
    packed: PackedAdapter


@dataclass(frozen=True, slots=True)
class CachedAdapter(Generic[T]):
    """`handle` is what `put` returned; `size_bytes` is what it occupies."""

    handle: T
    size_bytes: int


class _Kept(NamedTuple, Generic[T]):
    uri: str
    card: AdapterCard
    handle: T


class AdapterStore(Generic[T]):
    """Host cache and registry. All methods run on one event loop; only `read` and `put` leave it."""

    def __init__(
        self,
        catalog: Catalog,
        read: Callable[[str], LocatedAdapter],
        put: Callable[[PackedAdapter], T],
        *,
        max_bytes: int,
        reserved_names: Sequence[str] = (),
        quarantine: Quarantine | None = None,
    ) -> None:
        self._catalog = catalog
        self._read = read
        self._put = put
        self._max_bytes = max_bytes
        self._reserved_names = frozenset(reserved_names)
        self._threads = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="adapter-reader")
        self._cache: OrderedDict[str, CachedAdapter[T]] = OrderedDict()
        self._pending: dict[str, asyncio.Task[_Kept[T]]] = {}
        self._quarantine = quarantine or Quarantine()
        self.num_reads = 0
        self.num_hits = 0

    @property
    def cached_bytes(self) -> int:
        return sum(cached.size_bytes for cached in self._cache.values())

    @property
    def cached_digests(self) -> tuple[str, ...]:
        return tuple(self._cache)

    def entries(self) -> list[CatalogEntry]:
        return self._catalog.entries()

    async def register(self, name: str, source: str) -> CatalogEntry:
        """Read the adapter at `source` and give it a name. Re-registering a name replaces its meaning.

        Raises InvalidRequest for a name that cannot be one, and whatever reading raises.
        """
        if not re.fullmatch(NAME_PATTERN, name):
            raise InvalidRequest(
                f"adapter name {name[:80]!r} must be 1 to 128 letters, digits, '.', '_' or '-', "
                "beginning with a letter or digit",
                param="lora_name",
            )
        if name in self._reserved_names:
            raise InvalidRequest(f"the name {name!r} is the base model's; choose another", param="lora_name")
        uri, card, _ = await self._once(source, lambda: self._read_and_keep(source))
        self._quarantine.clear(card.digest)
        return await asyncio.to_thread(
            self._catalog.register,
            name,
            uri,
            card.digest,
            max_rank=card.max_rank,
            size_bytes=card.size_bytes,
        )

    async def unregister(self, name: str) -> CatalogEntry:
        """Forget a name. Raises NotFound, AdapterBusy."""
        entry = await asyncio.to_thread(self._catalog.drain, name)
        await asyncio.to_thread(self._catalog.drained, entry.ref)
        if all(other.ref.digest != entry.ref.digest for other in self.entries()):
            self._cache.pop(entry.ref.digest, None)
        return entry

    async def fetch(self, ref: AdapterRef) -> T:
        """The packed adapter with this digest.

        Raises AdapterMismatch if its source now holds something else, whatever reading raises, and
        AdapterQuarantined for a while after either.
        """
        cached = self._cache.get(ref.digest)
        if cached is not None:
            self._cache.move_to_end(ref.digest)
            self.num_hits += 1
            return cached.handle
        self._quarantine.check(ref.digest, f"adapter {ref.name!r}")
        return (await self._once(f"digest:{ref.digest}", lambda: self._load(ref))).handle

    def lost(self, digest: str) -> None:
        """A handle no longer resolves (its memory was lost): read the source again on the next fetch."""
        self._cache.pop(digest, None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

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
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have given up

    async def _load(self, ref: AdapterRef) -> _Kept[T]:
        """Contents that were registered before, from their source. A failure is remembered for a while."""
        try:
            kept = await self._once(ref.uri, lambda: self._read_and_keep(ref.uri))
            if kept.card.digest != ref.digest:
                raise AdapterMismatch(
                    f"adapter {ref.name!r} was registered with contents {ref.digest[:12]} but {ref.uri} now holds "
                    f"{kept.card.digest[:12]}; register it again"
                )
        except Exception as error:
            is_ours = isinstance(error, PolyloraError)
            self._quarantine.failed(ref.digest, str(error) if is_ours else f"internal error ({type(error).__name__})")
            raise
        self._quarantine.clear(ref.digest)
        return kept

    async def _read_and_keep(self, source: str) -> _Kept[T]:
        loop = asyncio.get_running_loop()
        self.num_reads += 1
        located = await loop.run_in_executor(self._threads, self._read, source)
        card = located.packed.card
        if card.size_bytes > self._max_bytes:
            raise AdapterTooLarge(
                f"the adapter at {source} has {card.size_bytes} bytes but adapters.host_cache_bytes is "
                f"{self._max_bytes}; raise it"
            )
        if card.digest not in self._cache:
            handle = await loop.run_in_executor(self._threads, self._put, located.packed)
            self._cache[card.digest] = CachedAdapter(handle, card.size_bytes)
        self._cache.move_to_end(card.digest)
        handle = self._cache[card.digest].handle
        while self.cached_bytes > self._max_bytes:
            self._cache.popitem(last=False)
        return _Kept(located.uri, card, handle)
