"""From a request to load an adapter to a name that every ingress serves, and back.

In: requests to load, unload, configure and alias. Out: jobs that go through the states of `entries.State`,
and the registry as a published table. A job is written down before work on it begins, so one that a crash
cut short is taken up again: a load by the next process, an unload by any ingress. "LOADED" is written when
every ingress holds the name. Loads of one name take effect in the order they were asked for; while a new
meaning is being read, the old one serves, and if reading fails it stays. An unload cancels those that were asked
for before. Reading is the store's; rows on devices are the replicas'.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from app.deployments.links.published import Published, PublishedTable
from app.deployments.registry.books import Registry
from app.deployments.registry.catalog import Drained, not_registered
from app.deployments.registry.entries import (
    AHEAD,
    AliasEntry,
    CatalogEntry,
    Description,
    LoadRequest,
    ReadAdapter,
    RegistryJob,
    State,
    Unload,
    check_name,
    check_source,
    is_name,
)
from app.deployments.registry.jobs import unloaded
from app.deployments.registry.moves import Moves
from app.deployments.registry.pins import PinBook, Pins
from app.deployments.registry.shares import ShareBook, Shares
from app.deployments.registry.view import Entry, Key
from app.engine.errors import InvalidRequest, NotFound, NotReady, PolyloraError

logger = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", CatalogEntry, AliasEntry, CatalogEntry | None)

#: How long "loaded" waits for every ingress to know it.
SETTLE_TIMEOUT_S = 5.0
#: An unload that no ingress has spoken of for this long is given to the one that asks.
UNSEEN_S = 35.0
#: The end of a load that the database did not take is offered to it again after this long.
RETRY_S = 5.0


class Store(Protocol):
    """What the lifecycle needs of the adapter store."""

    @property
    def cached_digests(self) -> Collection[str]: ...

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:
        """Read and keep an adapter. Raises what reading raises."""

    def forget(self, digest: str) -> None:
        """No name means these contents any more."""

    def hold(self, digests: Collection[str]) -> None:
        """Exactly these are pinned."""


class Lifecycle:
    """Used on one event loop; the database is called in threads. `reached` and `moved` may come from any thread."""

    def __init__(self, registry: Registry, store: Store, *, reserved_names: Sequence[str] = ()) -> None:
        self._registry = registry
        self._store = store
        self._reserved_names = frozenset(reserved_names)
        self.table: PublishedTable[Key, Entry] = PublishedTable()
        self._jobs: dict[str, RegistryJob] = {}  # being worked on
        self._passed: dict[str, list[tuple[State, float]]] = {}  # of these: written down with their last state
        self._tasks: dict[str, asyncio.Task[RegistryJob]] = {}
        self._cancelled: dict[str, asyncio.Future[None]] = {}  # per load: done when an unload has cancelled it
        self._last: dict[Key, asyncio.Task[RegistryJob]] = {}  # per name, the job that was asked for last
        self._seen_s: dict[str, float] = {}  # unloads, and when an ingress last said that it sees to them
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resumed = False
        self._changing = asyncio.Lock()  # the database and the table change in the same order
        self._moves = Moves(registry.catalog.note_moves)
        #: Contents came to or left a tier of this process: the event, the digest. Any thread.
        self.moved = self._moves.moved
        self._writing: set[asyncio.Task[None]] = set()
        adapters = registry.catalog.entries()
        entries: list[Entry] = [*adapters, *registry.aliases.entries()]
        self.table.publish({(entry.tenant_id, entry.name): entry for entry in entries})
        self._pin_book, self._share_book = PinBook(adapters), ShareBook(adapters)
        self.pins: Published[Pins] = Published(self._pin_book.value)
        self.shares: Published[Shares] = Published(self._share_book.value)
        store.hold(self._pin_book.value.digests)

    def resume(self) -> None:
        """Begin the loads again that the last process left, once."""
        if self._resumed:
            return
        unfinished = self._registry.jobs.unfinished()
        self._resumed = True
        self._loop = asyncio.get_running_loop()
        self._moves.begin()
        for job in unfinished:
            if job.kind == "load":
                self._begin(job)

    async def load(self, request: LoadRequest) -> RegistryJob:
        """Begin to load; returns the job. Its generation is the one that new contents would get.

        Raises InvalidRequest for a name that cannot be one, UnsafeSource for a source that cannot.
        """
        self._check_name(request.name)
        check_source(request.source)
        self.resume()
        catalog = self._registry.catalog
        present = await asyncio.to_thread(catalog.generations, request.name, tenant_id=request.tenant_id)
        job = await asyncio.to_thread(self._registry.jobs.create, request)
        self._begin(job)
        return replace(job, generation=1 + (present[0].ref.generation if present else 0))

    async def load_and_wait(self, request: LoadRequest) -> tuple[RegistryJob, CatalogEntry]:
        """`load`, and its end. Raises what made it fail."""
        task = self._tasks[(await self.load(request)).id]
        job = await asyncio.shield(task)
        entry = await asyncio.to_thread(self._registry.catalog.get, job.name, tenant_id=job.tenant_id)
        if entry is None:
            raise NotFound(f"adapter {job.name!r} was unloaded as soon as it was loaded")
        return job, entry

    async def begin_unload(self, name: str, *, tenant_id: str, who: str) -> tuple[Unload, CatalogEntry | None]:
        """Take a name out of service: when this returns no ingress knows it. `end_unload` follows, or `left_unloads`.

        Loads of it that were asked for before end with AdapterUnloaded; if there was nothing else the unload has no
        digest, and is over. Raises NotFound, AdapterBusy.
        """
        done: list[Drained] = []

        def drain() -> CatalogEntry | None:
            done.append(self._registry.catalog.drain(name, tenant_id=tenant_id, who=who))
            return done[0].entry

        entry = await self._change(drain, is_gone=True)
        for job_id in done[0].cancelled:
            if (cancelled := self._cancelled.get(job_id)) is not None and not cancelled.done():
                cancelled.set_result(None)
        return await asyncio.to_thread(self._unload, done[0].job), entry

    async def end_unload(self, unload: Unload) -> RegistryJob:
        """No sequence uses the adapter any more and its rows are free: free the host's copy, and be done."""
        assert unload.digest is not None, "then it is over"
        if not await self.is_used(unload.digest):
            self._store.forget(unload.digest)
        return await asyncio.to_thread(self._registry.catalog.drained, unload.job)

    async def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        return await asyncio.to_thread(self._registry.catalog.is_used, digest)

    async def left_unloads(self, seen_to: Collection[str]) -> list[Unload]:
        """Unloads that nobody sees to, for the caller to end; `seen_to` are the ids of those that it sees to already.

        Their ingress has ended, or could not tell the registry. Should it be there after all, two end the same unload.
        """
        now_s = time.time()
        jobs = await asyncio.to_thread(self._registry.jobs.unfinished)
        last_s = {job.id: max(job.created_s, self._seen_s.get(job.id, 0.0)) for job in jobs if job.kind == "unload"}
        left = [job for job in jobs if job.id in last_s and job.id not in seen_to and now_s - last_s[job.id] > UNSEEN_S]
        self._seen_s = last_s | dict.fromkeys((*seen_to, *(job.id for job in left)), now_s)
        return [await asyncio.to_thread(self._unload, job) for job in left]

    async def configure(
        self,
        name: str,
        *,
        tenant_id: str,
        who: str,
        pinned: bool | None = None,
        traffic_weight: float | None = None,
    ) -> CatalogEntry:
        """Change how a name is treated (None: as it is); every ingress knows when this returns. Raises NotFound."""
        configure = self._registry.catalog.configure
        return await self._change(
            lambda: configure(name, pinned=pinned, traffic_weight=traffic_weight, tenant_id=tenant_id, who=who)
        )

    async def put_alias(self, name: str, targets: Mapping[str, float], *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.put`; every ingress knows when it returns, as with the other changes of aliases."""
        self._check_name(name)
        aliases = self._registry.aliases
        return await self._change(lambda: aliases.put(name, targets, tenant_id=tenant_id, who=who))

    async def promote_alias(self, name: str, target: str, *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.promote`."""
        self._check_name(name)
        aliases = self._registry.aliases
        return await self._change(lambda: aliases.promote(name, target, tenant_id=tenant_id, who=who))

    async def roll_back_alias(self, name: str, version: int | None, *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.rollback`."""
        self._check_name(name)
        aliases = self._registry.aliases
        return await self._change(lambda: aliases.rollback(name, version, tenant_id=tenant_id, who=who))

    async def remove_alias(self, name: str, *, tenant_id: str, who: str) -> AliasEntry:
        """`Aliases.remove`."""
        self._check_name(name)
        aliases = self._registry.aliases
        return await self._change(lambda: aliases.remove(name, tenant_id=tenant_id, who=who), is_gone=True)

    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name that nobody ever asked for."""
        if not is_name(name):
            raise not_registered(name)
        entry, job = await asyncio.gather(
            asyncio.to_thread(self._registry.catalog.get, name, tenant_id=tenant_id),
            asyncio.to_thread(self._registry.jobs.latest, name, tenant_id=tenant_id),
        )
        if entry is None and (job is None or job.state is State.REMOVED):
            raise not_registered(name)
        is_on_host = entry is not None and entry.ref.digest in self._store.cached_digests
        return Description(entry, job and self._jobs.get(job.id, job), is_on_host)

    async def job(self, job_id: str, *, tenant_id: str) -> RegistryJob:
        """A job as it stands now. Raises NotFound."""
        running = self._jobs.get(job_id)
        if running is not None and running.tenant_id == tenant_id:
            return running
        job = await asyncio.to_thread(self._registry.jobs.get, job_id, tenant_id=tenant_id)
        if job is None:
            raise NotFound(f"there is no job {job_id[:80]!r}")
        return job

    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        """A replica tells what its device holds now, and which digests requests have used since it last told."""
        await asyncio.to_thread(self._registry.catalog.note_use, used_s)
        # Last: what fails is told again, and would be in the journal twice.
        await asyncio.to_thread(self._registry.catalog.note_residency, replica_id, loaded, unloaded)

    async def hot(self, limit: int) -> list[CatalogEntry]:
        """What a new replica should hold before it is ready, beside what is pinned: the hottest first."""
        return await asyncio.to_thread(self._registry.catalog.hot, limit)

    def reached(self, source: str, state: State) -> None:
        """Reading a source has come this far: every job that waits for it has. Any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._note, source, state)

    def _unload(self, job: RegistryJob) -> Unload:
        return Unload(job, job.digest, job.digest is None or self._registry.catalog.is_used(job.digest))

    def _check_name(self, name: str) -> None:
        check_name(name)
        if name in self._reserved_names:
            raise InvalidRequest(f"the name {name!r} is the base model's; choose another", param="name")

    def _begin(self, job: RegistryJob) -> None:
        key = (job.tenant_id, job.name)
        self._jobs[job.id], self._passed[job.id] = job, []
        self._cancelled[job.id] = asyncio.get_running_loop().create_future()
        task = self._spawn(self._run(job.id, self._last.get(key)))
        self._tasks[job.id] = self._last[key] = task

        def end(task: asyncio.Task[RegistryJob]) -> None:
            del self._jobs[job.id], self._passed[job.id], self._tasks[job.id], self._cancelled[job.id]
            if self._last.get(key) is task:
                del self._last[key]
            if not task.cancelled():
                task.exception()  # retrieved: nobody may have waited

        task.add_done_callback(end)

    async def _run(self, job_id: str, before: asyncio.Task[RegistryJob] | None) -> RegistryJob:
        job = self._jobs[job_id]
        self._loop = asyncio.get_running_loop()
        try:
            self._note(job.source, State.DOWNLOADING, job_id)
            uri, card = await self._read(job)
            self._note(job.source, State.ON_HOST, job_id)
            if before is not None:
                await asyncio.wait([before])
            register = partial(
                self._registry.catalog.register,
                job.name,
                uri,
                card.digest,
                max_rank=card.max_rank,
                size_bytes=card.size_bytes,
                extra_bytes=card.extra_bytes,
                tenant_id=job.tenant_id,
                who=job.requested_by,
                pinned=job.pinned,
                traffic_weight=job.traffic_weight,
                source=job.source,
                job=job,
            )
            entry = await self._change(register)
            generation, digest = entry.ref.generation, entry.ref.digest
            return await self._end(job_id, State.LOADED, generation=generation, digest=digest)
        except Exception as error:
            is_ours = isinstance(error, PolyloraError)
            if not is_ours:
                logger.exception("loading %s failed", job.name)
            reason = str(error) if is_ours else f"internal error ({type(error).__name__}); the store's log has it"
            await self._end(job_id, State.FAILED, reason=reason)
            raise

    async def _read(self, job: RegistryJob) -> ReadAdapter:
        """Ends at once when the job is cancelled; others may wait for what is read, so reading goes on."""
        reading = self._spawn(self._store.load(job.source, job.tenant_id))
        either: list[asyncio.Future[Any]] = [reading, self._cancelled[job.id]]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved: it is nobody's
        raise unloaded(job.name)

    async def _end(self, job_id: str, state: State, **what: Any) -> RegistryJob:
        """A job's last state. While the database does not take it nobody waits: it is written down later."""
        job, passed = self._jobs[job_id], tuple(self._passed[job_id])
        write = partial(self._registry.jobs.advance, job, state, passed=passed, **what)
        try:
            self._jobs[job_id] = await asyncio.to_thread(write)
        except NotReady as error:
            logger.warning("that %s is %s is written down later: %s", job.name, state, error)
            self._jobs[job_id] = replace(job, state=state, **what)
            task = self._spawn(_insist(write))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return self._jobs[job_id]

    def _note(self, source: str, state: State, job_id: str | None = None) -> None:
        """A job that is further already stays there: the source is being read again, for another."""
        for job in list(self._jobs.values()):
            if job.source == source and job_id in (None, job.id) and state in AHEAD.get(job.state, ()):
                now_s = time.time()
                self._jobs[job.id] = replace(job, state=state, updated_s=now_s)
                self._passed[job.id].append((state, now_s))

    async def _change(self, call: Callable[[], E], *, is_gone: bool = False) -> E:
        """Change the database and the table; returns when every ingress holds the change.

        In a task of its own: a caller that leaves in between must not part the two.
        """

        async def change() -> E:
            async with self._changing:
                entry = await asyncio.to_thread(call)
                if entry is None:
                    return entry
                key, now = (entry.tenant_id, entry.name), None if is_gone else entry
                self.table.publish({key: now})
                if self._pin_book.apply(key, now):
                    self._store.hold(self._pin_book.value.digests)
                    self.pins.publish(self._pin_book.value)
                if self._share_book.apply(key, now):
                    self.shares.publish(self._share_book.value)
            if not await self.table.settled(SETTLE_TIMEOUT_S):
                logger.warning("an ingress did not take over a change of the registry in %g s", SETTLE_TIMEOUT_S)
            return entry

        return await asyncio.shield(self._spawn(change()))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of our own: it goes on when the call that began it is cancelled."""
        return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


async def _insist(write: Callable[[], RegistryJob]) -> None:
    """Until the database takes it."""
    while True:
        await asyncio.sleep(RETRY_S)
        with contextlib.suppress(NotReady):
            await asyncio.to_thread(write)
            return
