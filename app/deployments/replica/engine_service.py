"""One engine and its readers: a replica without Ray.

Each request enters the engine once per request id. An adapter that is not mapped is fetched in the background, so it
delays only its own requests, and a failure arrives as their last chunk. When a reader leaves, its requests are aborted.
A failed or stopped engine looks like a dead replica: its readers get `ReplicaGone` and may continue elsewhere. Requests
that may have caused an engine failure enter one at a time (`SuspectQueue`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from app.deployments.placement.messages import ReplicaReport
from app.deployments.replica.adapter_fetcher import AdapterFetcher, MappedAdapters
from app.deployments.replica.suspect_isolation import SuspectQueue
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.frames import FrameHub, pack_frame
from app.deployments.rpc.transport import EngineFailed, ReplicaGone
from app.deployments.rpc.uds_transport import FrameSocket
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.engine_thread import EngineThread
from app.engine.errors import EngineFailure, PolyloraError, QueueFull
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.scheduling.fair_limiter import FairLimiter

logger = logging.getLogger(__name__)

#: Number of recently requested adapters that are remembered.
MAX_REQUESTED = 65_536
#: How often the running step is checked for a hang.
STEP_CHECK_INTERVAL_S = 1.0
#: A link without requests ends after this long.
IDLE_S = 2.0
#: The same for a link through Ray, unless this replica drains. The reader's node may be cut off, and at the end of its
#: call Ray holds the event loop until the reader has everything, or until Ray has declared the node dead, which takes a
#: minute and ends the link.
REMOTE_IDLE_S = 180.0


class EngineService:
    """Created and used on one event loop; only `on_step` may be called from the engine's thread.

    `clock` gives Unix time, because reports contain when adapters were last used. `max_queued_requests` is the engine's
    limit; as many requests may wait for their adapters before they enter it.
    """

    def __init__(
        self,
        adapters: AdapterFetcher,
        clock: Callable[[], float],
        *,
        max_queued_requests: int,
        usage_recorder: UsageRecorder | None = None,
        idle_s: float = IDLE_S,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.adapters = MappedAdapters(adapters)
        self._usage_recorder = usage_recorder
        self._unbilled: dict[str, GenerateRequest] = {}  # submitted, usage not recorded yet
        self._clock = clock
        self._idle_s = idle_s
        self._is_draining = is_draining
        self._engine: EngineThread | None = None
        self._loop = asyncio.get_running_loop()
        self._hub = FrameHub()
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._fetch_us: dict[str, int] = {}  # of requests that waited for their adapter
        self._waiting_places = FairLimiter[str]("engine.max_queued_requests", max_queued_requests)
        self._suspects = SuspectQueue()
        self._tasks = Tasks()
        self._final_error: ReplicaGone | None = None
        self._active: dict[str, str] = {}  # request id -> adapter digest
        self._used_s: dict[str, float] = {}  # adapter digest -> its last use, until `drain_usage`
        self._last_used_s: dict[str, float] = {}  # the same for resident and active adapters
        self._requested_s: dict[str, float] = {}  # adapter digest -> its last request, oldest first
        self.changed = asyncio.Event()  # set when adapters may have moved; a report is due

    def start(self, engine: EngineThread) -> None:
        """Serve this engine; its callback must be `on_step`."""
        self._engine = engine

    @property
    def engine(self) -> EngineThread:
        assert self._engine is not None, "start() comes first"
        return self._engine

    @property
    def num_links(self) -> int:
        return self._hub.num_links

    @property
    def num_waiting_for_adapters(self) -> int:
        return len(self._waiting)

    def on_step(self, chunks: list[TokenChunk]) -> None:
        """The engine's callback; any thread."""
        self._loop.call_soon_threadsafe(self._deliver, chunks)

    async def watch_steps(self, max_step_s: float) -> None:
        """Detect a hanging step, until cancelled; its requests continue elsewhere."""
        while True:
            await asyncio.sleep(STEP_CHECK_INTERVAL_S)
            has_failed = await asyncio.to_thread(self.engine.check_progress, max_step_s)  # it may end a process
            if has_failed and self.engine.failure is not None:
                self._hub.end(self._end_error(self.engine.failure))

    async def frames(self, link_id: str, *, is_remote: bool = False) -> AsyncGenerator[list[TokenChunk]]:
        """Frames of one reader until it leaves or has been idle for `idle_s`, or `REMOTE_IDLE_S`. Raises ReplicaGone if
        the engine fails."""

        def idle_s() -> float:
            return REMOTE_IDLE_S if is_remote and not self._is_draining() else self._idle_s

        try:
            async for frame in self._hub.frames(link_id, idle_s):
                yield frame
        finally:
            self.abort(self._hub.detach(link_id))

    async def packed_frames(self, link_id: str, socket: FrameSocket | None) -> AsyncGenerator[bytes]:
        """`frames` in wire format. With a socket only the first is yielded; the others go through the reader's
        connection.

        When the reader closes that connection, its link ends and its requests are aborted.
        """
        leave = partial(self._hub.close_link, link_id)
        async with aclosing(self.frames(link_id, is_remote=socket is None)) as frames:
            packed = (pack_frame(frame) async for frame in frames)
            async with aclosing(packed if socket is None else socket.carry(link_id, frames, leave)) as items:
                async for item in items:
                    yield item

    def submit(self, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        """Accept requests whose chunks go to this link. Returns False if it is not attached.

        Errors of single requests arrive as their last chunk. Raises ReplicaGone if the engine has failed; another
        replica can serve the requests.
        """
        if self.engine.failure is not None:
            raise self._end_error(self.engine.failure)
        if not self._hub.is_attached(link_id):
            return False
        for request in requests:
            if self._hub.is_registered(request.request_id):
                continue
            self._hub.register(link_id, request.request_id)
            if (ref := request.adapter) is None:
                self._enter(request, None)
                continue
            self._requested_s.pop(ref.digest, None)
            self._requested_s[ref.digest] = self._clock()
            if len(self._requested_s) > MAX_REQUESTED:
                del self._requested_s[next(iter(self._requested_s))]
            if (adapter := self.adapters.get(ref.digest)) is not None:
                self._enter(request, adapter)
            else:
                self._wait_for_adapter(request, ref)
        return True

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; none of their chunks is delivered afterwards."""
        for request_id in request_ids:
            self._hub.unregister(request_id)
            self._active.pop(request_id, None)
            self._fetch_us.pop(request_id, None)
            self._suspects.remove(request_id)
            if (task := self._stop_waiting(request_id)) is not None:
                task.cancel()
            else:
                self.engine.abort(request_id)

    async def unload_adapter(self, digest: str) -> int:
        """Free an adapter's rows once its last sequence has ended; returns the number of freed rows.

        The mapping in this process is dropped too; the next request fetches the adapter again.
        """
        self.adapters.remove(digest)
        return await asyncio.wrap_future(self.engine.unload_adapter(digest))

    def cached_digests(self) -> set[str]:
        """Digests of adapters that are on the device or mapped in this process."""
        return {*(resident.digest for resident in self.engine.stats().residents), *self.adapters.digests}

    def on_prefetched(self, adapter: LoraAdapter, ref: AdapterRef, written_bytes: int) -> None:
        """An adapter was loaded to the device without a request."""
        if self._usage_recorder is not None:
            self._usage_recorder.record_load(ref, written_bytes)
        self.adapters.add(adapter)
        self.changed.set()

    def drain_usage(self) -> dict[str, float]:
        """Adapters used since the last call, with the Unix time of their last use."""
        used_s, self._used_s = self._used_s, {}
        return used_s

    def requested_within(self, seconds: float) -> list[str]:
        """Digests of adapters requested in the last `seconds`; older ones are forgotten."""
        since_s = self._clock() - seconds
        for digest, requested_s in list(self._requested_s.items()):
            if requested_s >= since_s:
                break
            del self._requested_s[digest]
        return list(self._requested_s)

    def counts(self) -> dict[str, Any]:
        """Counts of the engine, for tests and operators."""
        stats = self.engine.stats()
        return {
            "engine": stats.engine,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting + self.num_waiting_for_adapters,
            "num_blocks": stats.num_blocks,
            "num_blocks_free": stats.num_blocks_free,
            "num_rank_rows_free": stats.num_rank_rows_free,
            "residents": tuple(resident.digest for resident in stats.residents),
            "in_use": tuple(resident.digest for resident in stats.residents if resident.num_refs),
            "num_adapter_hits": stats.num_adapter_hits,
            "num_adapter_misses": stats.num_adapter_misses,
            "num_adapter_writes": stats.num_adapter_writes,
            "num_tokens_generated": stats.num_tokens_generated,
            "num_aborted": stats.num_aborted,
        }

    def report(self, replica_id: str, num_running: int, num_waiting: int, resident: tuple[str, ...]) -> ReplicaReport:
        """The report for placement."""
        active = dict(Counter(self._active.values()))
        here = {*resident, *active}  # an active adapter may become resident after this report
        self._last_used_s = {digest: used_s for digest, used_s in self._last_used_s.items() if digest in here}
        last_used_s = {digest: used_s for digest, used_s in self._last_used_s.items() if digest in resident}
        num_waiting += len(self._waiting) + self._suspects.num_waiting
        return ReplicaReport(replica_id, num_running, num_waiting, resident, active, last_used_s)

    def _wait_for_adapter(self, request: GenerateRequest, ref: AdapterRef) -> None:
        """Fetch in the background. A resumed request is outside the limit, as in the engine."""
        try:
            is_resumed = bool(request.resume_token_ids)
            gave_way = [] if is_resumed else self._waiting_places.add(request.request_id, request.tenant_id)
        except QueueFull as error:
            self._fail(request.request_id, error)
            return
        self._waiting[request.request_id] = self._tasks.start(self._enter_when_fetched(request, ref))
        for other, refusal in gave_way:
            if (task := self._stop_waiting(other)) is not None:
                task.cancel()
            self._fail(other, refusal)

    def _stop_waiting(self, request_id: str) -> asyncio.Task[None] | None:
        """The request waits for its adapter no more; its task, if it did."""
        self._waiting_places.remove(request_id)
        return self._waiting.pop(request_id, None)

    async def _enter_when_fetched(self, request: GenerateRequest, ref: AdapterRef) -> None:
        began_s = time.perf_counter()
        try:
            adapter = await self.adapters.fetch(ref)
        except Exception as error:
            self._stop_waiting(request.request_id)
            self._fail(request.request_id, error)
            return
        self._stop_waiting(request.request_id)
        self._fetch_us[request.request_id] = round((time.perf_counter() - began_s) * 1e6)
        self._enter(request, adapter)

    def _enter(self, request: GenerateRequest, adapter: LoraAdapter | None) -> None:
        if request.num_failures:
            self._suspects.add(request, partial(self._submit, request, adapter))
        else:
            self._submit(request, adapter)

    def _submit(self, request: GenerateRequest, adapter: LoraAdapter | None) -> bool:
        """Whether the engine accepted the request; otherwise its client gets an error, or all links end."""
        try:
            self.engine.submit(request, adapter)
        except Exception as error:
            if (failure := self.engine.failure) is not None:
                if not failure.computing:  # otherwise links end after the last chunks (`_deliver`)
                    self._hub.end(self._end_error(failure))
            else:  # one request's error must not affect the others of its group
                self._fail(request.request_id, error)
            return False
        self._unbilled[request.request_id] = request
        if adapter is not None:
            self._active[request.request_id] = adapter.card.digest
            self._used_s[adapter.card.digest] = self._last_used_s[adapter.card.digest] = self._clock()
            self.changed.set()
        return True

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.finish_reason is not None and self._active.pop(chunk.request_id, None) is not None:
                self.changed.set()
        failure = self.engine.failure  # possibly of a step whose chunks have not arrived yet
        is_over = failure is not None and any(chunk.error is failure for chunk in chunks)
        if is_over:
            chunks = [chunk for chunk in chunks if chunk.error is not failure]
        if self._fetch_us:
            chunks = [self._with_fetch(chunk) for chunk in chunks]
        if self._final_error is not None:  # of a step that hung: what has left continues, and is counted, elsewhere
            chunks = [chunk for chunk in chunks if self._hub.is_registered(chunk.request_id)]
        self._hub.deliver(chunks)
        for chunk in chunks:
            self._suspects.on_chunk(chunk)
            if chunk.finish_reason is not None:
                self._count(chunk)
        if failure is not None and is_over:
            self._hub.end(self._end_error(failure))

    def _with_fetch(self, chunk: TokenChunk) -> TokenChunk:
        """The chunk with the time for which its request waited for its adapter here."""
        fetch_us = self._fetch_us.get(chunk.request_id)
        if fetch_us is None:
            return chunk
        if chunk.finish_reason is not None:
            del self._fetch_us[chunk.request_id]
        return chunk if chunk.timing is None else chunk._replace(timing=chunk.timing._replace(fetch_us=fetch_us))

    def _count(self, chunk: TokenChunk) -> None:
        """Record the usage of a finished request; one that continues elsewhere is recorded there."""
        request = self._unbilled.pop(chunk.request_id, None)
        if request is not None and chunk.request_usage is not None and self._usage_recorder is not None:
            self._usage_recorder.record_usage(request, chunk.request_usage)

    def _end_error(self, failure: EngineFailure) -> ReplicaGone:
        """The error for every reader, naming the requests that may have caused the failure."""
        if self._final_error is None:
            if self._suspects.current in failure.computing:
                self._final_error = EngineFailed(str(failure), culprit=self._suspects.current)
            elif failure.computing:
                self._final_error = EngineFailed(str(failure), suspects=failure.computing)
            else:
                self._final_error = ReplicaGone(str(failure))
        return self._final_error

    def _fail(self, request_id: str, error: Exception) -> None:
        self._fetch_us.pop(request_id, None)
        if not isinstance(error, PolyloraError):
            logger.error("unexpected error while admitting request %s", request_id, exc_info=error)
            error = EngineFailure("internal error while admitting the request; the replica's log has the details")
        self._hub.deliver([TokenChunk(request_id, finish_reason="error", error=error)])
