"""Load jobs: from a request to a name that every ingress serves.

A job is stored before work on it begins, so another process can adopt what a crash interrupted. Loads of one name take
effect in the order of their requests, whichever process works on them. While new contents are read the old ones serve,
and if reading fails they stay. "LOADED" is stored once every ingress has the name. Reading is done by the store, device
rows by the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from app.deployments.registry.feed.change_feed import ChangeFeed
from app.deployments.registry.feed.view import Key
from app.deployments.registry.jobs.failure_backoff import failure_reason
from app.deployments.registry.jobs.job_table import EarlierLoadsPending, unloaded_error
from app.deployments.registry.models import (
    MAX_METADATA_CHARS,
    STATES_AHEAD,
    CatalogEntry,
    LoadRequest,
    ReadAdapter,
    RegistryJob,
    State,
    check_description,
    check_source,
)
from app.deployments.registry.registry import Registry
from app.deployments.rpc.background_tasks import Tasks
from app.engine.adapters.card import TRAINED_ON, AdapterCard
from app.engine.adapters.combining.combination import display_source, is_combination
from app.engine.errors import ModelNotFound, NotReady, PolyloraError
from app.engine.scheduling.fair_limiter import FairLimiter
from app.logging import LogEvent
from app.model_names import base_warning

logger = logging.getLogger(__name__)

#: The final state of a load that the database did not accept is written again after this long.
RETRY_S = 5.0
#: How often a load checks whether earlier loads of its name in other processes have ended.
TURN_INTERVAL_S = 0.5
#: Loads that one process works on at a time. Beyond it a load of the tenant with most fails for a tenant with fewer:
#: the newest, unless its adapter has been read. Adopted loads are never refused.
MAX_LOADS = 10_000
#: Adopted loads of one host that run at a time: a running load is a dozen objects, and the garbage collection of
#: thousands of them stops the event loop for 0.1 s and more.
MAX_ADOPTED_PER_HOST = 64
#: Loads that are adopted before other work of the event loop gets its turn.
_ADOPT_BATCH = 50


class Reader(Protocol):
    """What load jobs need of the host cache."""

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:
        """Read an adapter and keep it in host memory. Raises what reading raises."""

    def host(self, source: str) -> str:
        """The host of a source: sources of one host may be slow together."""

    def invalidate(self, digest: str) -> None:
        """Free the host copy: no name means these contents."""


class LoadJobs:
    """One event loop; the database is called in threads."""

    def __init__(
        self,
        registry: Registry,
        store: Reader,
        change_feed: ChangeFeed,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._store = store
        self._change_feed = change_feed
        self._clock = clock
        self._jobs: dict[str, RegistryJob] = {}  # running jobs by id
        self._ids_by_source: defaultdict[str, set[str]] = defaultdict(set)  # source -> ids of running jobs
        self._state_times: dict[
            str, list[tuple[State, float]]
        ] = {}  # job id -> states passed, stored with the last one
        self._read_digests: dict[str, str] = {}  # job id -> digest, once it was read
        self._tasks: dict[str, asyncio.Task[RegistryJob]] = {}
        self._cancelled: dict[str, asyncio.Future[PolyloraError]] = {}  # job id -> done, with why, when it is cancelled
        self._adopted: dict[str, dict[str, RegistryJob]] = {}  # host -> adopted loads by id that have not begun
        self._num_adopted_running: Counter[str] = Counter()  # host -> how many adopted loads are running
        self._last_by_name: dict[Key, asyncio.Task[RegistryJob]] = {}  # per name, the last requested load
        self._places = FairLimiter[str]("the number of loads at a time", MAX_LOADS, retry_after_s=5)
        self._work, self._writing = Tasks(), Tasks()

    async def adopt(self, jobs: Sequence[RegistryJob]) -> None:
        """Work on the loads of a dead process in their order, a few of each host at a time."""
        for number, job in enumerate(jobs):
            host = self._store.host(job.source)
            self._adopted.setdefault(host, {})[job.id] = job
            self._begin_adopted(host)
            if number % _ADOPT_BATCH == _ADOPT_BATCH - 1:
                await asyncio.sleep(0)

    async def load(self, request: LoadRequest, read: ReadAdapter | None = None) -> RegistryJob:
        """Start a load and return its job, with the generation that new contents would get.

        `read`: the adapter, if the source has just been read. Raises UnsafeSource, InvalidRequest, and QueueFull while
        too many loads are running.
        """
        check_source(request.source)
        check_description(request.description)
        place = uuid.uuid4().hex  # until the job has an id
        self._take_place(place, request.tenant_id)
        try:
            catalog = self._registry.catalog
            present = await asyncio.to_thread(catalog.generations, request.name, tenant_id=request.tenant_id)
            job = await asyncio.to_thread(self._registry.jobs.create, request)
        finally:
            self._places.remove(place)
        self._begin(job, read)
        return replace(job, generation=1 + (present[0].ref.generation if present else 0))

    async def load_and_wait(
        self, request: LoadRequest, read: ReadAdapter | None = None
    ) -> tuple[RegistryJob, CatalogEntry]:
        """Load and wait for the end. Raises what made the load fail."""
        task = self._tasks[(await self.load(request, read)).id]
        job = await asyncio.shield(task)
        entry = await asyncio.to_thread(self._registry.catalog.get, job.name, tenant_id=job.tenant_id)
        if entry is None:
            raise ModelNotFound(f"adapter {job.name!r} was unloaded as soon as it was loaded")
        return job, entry

    def cancel(self, job_ids: Collection[str]) -> None:
        """End these loads with AdapterUnloaded: their name was unloaded."""
        for job_id in job_ids:
            if (cancelled := self._cancelled.get(job_id)) is not None and not cancelled.done():
                cancelled.set_result(unloaded_error(self._jobs[job_id].name))
            for adopted in self._adopted.values():
                adopted.pop(job_id, None)

    def running(self, job_id: str) -> RegistryJob | None:
        """The present state of a running load; None for any other job."""
        return self._jobs.get(job_id)

    def on_progress(self, source: str, state: State, job_id: str | None = None) -> None:
        """Reading a source has reached `state`: advance the jobs that wait for it, or only `job_id`.

        A job that is already further stays there: the source is being read again for another job.
        """
        now_s = self._clock()
        for id_ in self._ids_by_source.get(source, ()) if job_id is None else (job_id,):
            if state in STATES_AHEAD.get(self._jobs[id_].state, ()):
                self._jobs[id_] = replace(self._jobs[id_], state=state, updated_s=now_s)
                self._state_times[id_].append((state, now_s))

    def _take_place(self, place: str, tenant_id: str) -> None:
        """Count a load that is about to begin. Raises QueueFull."""
        for other, refusal in self._places.add(place, tenant_id):
            if (cancelled := self._cancelled.get(other)) is not None and not cancelled.done():
                cancelled.set_result(refusal)

    def _begin_adopted(self, host: str) -> None:
        """Start a host's next adopted loads, up to the limit."""
        adopted = self._adopted.get(host, {})
        while adopted and self._num_adopted_running[host] < MAX_ADOPTED_PER_HOST:
            self._num_adopted_running[host] += 1
            self._begin(adopted.pop(next(iter(adopted)))).add_done_callback(partial(self._end_adopted, host))
        if not adopted:
            self._adopted.pop(host, None)

    def _end_adopted(self, host: str, _: asyncio.Task[RegistryJob]) -> None:
        self._num_adopted_running[host] -= 1
        self._begin_adopted(host)

    def _begin(self, job: RegistryJob, read: ReadAdapter | None = None) -> asyncio.Task[RegistryJob]:
        key = (job.tenant_id, job.name)
        self._places.add(job.id, job.tenant_id, is_forced=True)
        self._jobs[job.id], self._state_times[job.id] = job, []
        self._ids_by_source[job.source].add(job.id)
        self._cancelled[job.id] = asyncio.get_running_loop().create_future()
        task = self._work.start(self._run(job.id, self._last_by_name.get(key), read))
        self._tasks[job.id] = self._last_by_name[key] = task

        def end(task: asyncio.Task[RegistryJob]) -> None:
            del self._jobs[job.id], self._state_times[job.id], self._tasks[job.id], self._cancelled[job.id]
            self._places.remove(job.id)
            self._read_digests.pop(job.id, None)
            self._ids_by_source[job.source].discard(job.id)
            if not self._ids_by_source[job.source]:
                del self._ids_by_source[job.source]
            if self._last_by_name.get(key) is task:
                del self._last_by_name[key]

        task.add_done_callback(end)
        return task

    async def _run(
        self, job_id: str, before: asyncio.Task[RegistryJob] | None, read: ReadAdapter | None
    ) -> RegistryJob:
        job = self._jobs[job_id]
        try:
            self.on_progress(job.source, State.DOWNLOADING, job_id)
            uri, card = await self._read(job) if read is None else read
            self._read_digests[job_id] = card.digest
            self.on_progress(job.source, State.ON_HOST, job_id)
            if before is not None:
                await asyncio.wait([before])
            if is_combination(job.source):
                card = replace(card, text=await asyncio.to_thread(self._registry.catalog.common_text, job.source))
            bounded_card = replace(card, metadata=_bounded_metadata(job.name, card))
            register = partial(self._registry.catalog.register, job.request, uri, bounded_card, job)
            entry = await self._register_in_turn(register)
            self._warn_of_other_base(entry)
            generation, digest = entry.ref.generation, entry.ref.digest
            return await self._end(job_id, State.LOADED, generation=generation, digest=digest)
        except Exception as error:
            if not isinstance(error, PolyloraError):
                logger.exception("loading %s failed", job.name)
            await self._end(job_id, State.FAILED, reason=failure_reason(error))
            if (refused := self._read_digests.pop(job_id, None)) is not None:
                await self._release_host_copy(refused)
            raise

    def _warn_of_other_base(self, entry: CatalogEntry) -> None:
        trained_on = json.loads(entry.metadata or "{}").get(TRAINED_ON)
        base_name = min(self._registry.aliases.base_names, default="")
        if (warning := base_warning(trained_on, base_name, self._registry.base_uri)) is not None:
            logger.warning("adapter %s: %s", entry.name, warning)

    async def _release_host_copy(self, digest: str) -> None:
        """Free the host copy of refused contents, unless a name means them or another load has read them."""
        with contextlib.suppress(NotReady):  # unknown while the database is away: the copy stays until it is evicted
            is_used = await asyncio.to_thread(self._registry.catalog.is_used, digest)
            if not is_used and digest not in self._read_digests.values():
                self._store.invalidate(digest)

    async def _register_in_turn(self, register: Callable[[], CatalogEntry]) -> CatalogEntry:
        """Register after the earlier loads of the name that other processes work on."""
        while True:
            try:
                return await self._change_feed.change(register)
            except EarlierLoadsPending:
                await asyncio.sleep(TURN_INTERVAL_S)

    async def _read(self, job: RegistryJob) -> ReadAdapter:
        """Ends at once when the job is cancelled; reading goes on, for others may wait for it."""
        reading = self._work.start(self._store.load(job.source, job.tenant_id))
        either: list[asyncio.Future[Any]] = [reading, self._cancelled[job.id]]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        reading.cancel()
        raise self._cancelled[job.id].result()

    async def _end(self, job_id: str, state: State, **what: Any) -> RegistryJob:
        """Store a job's last state, later if the database does not accept it now: no caller waits for that."""
        job, passed = self._jobs[job_id], tuple(self._state_times[job_id])
        logger.log(
            logging.WARNING if state is State.FAILED else logging.INFO,
            LogEvent(
                f"adapter {state.lower()}",
                name=job.name,
                tenant=job.tenant_id,
                by=job.requested_by,
                source=display_source(job.source),
                seconds=self._clock() - job.created_s,
                **what,
            ),
        )
        write = partial(self._registry.jobs.advance, job, state, passed=passed, **what)
        try:
            self._jobs[job_id] = await asyncio.to_thread(write)
        except NotReady as error:
            logger.warning("the state of %s, %s, will be stored later: %s", job.name, state, error)
            self._jobs[job_id] = replace(job, state=state, **what)
            self._writing.start(_retry_until_written(write))
        return self._jobs[job_id]


async def _retry_until_written(write: Callable[[], RegistryJob]) -> None:
    while True:
        await asyncio.sleep(RETRY_S)
        with contextlib.suppress(NotReady):
            await asyncio.to_thread(write)
            return


def _bounded_metadata(name: str, card: AdapterCard) -> str:
    """The card's metadata, or nothing if it is too long for every ingress to hold."""
    if len(card.metadata) <= MAX_METADATA_CHARS:
        return card.metadata
    logger.warning(
        "the card of adapter %s has %d characters of metadata, which are dropped: at most %d are stored",
        name, len(card.metadata), MAX_METADATA_CHARS,
    )  # fmt: skip
    return ""
