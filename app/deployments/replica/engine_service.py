"""One engine and those who read from it: what a replica does, without Ray.

In: groups of requests from ingress links. Out: frames of chunks. An adapter that is not at hand is
fetched beside the engine, so it delays only its own requests; its failure is theirs alone and arrives
as their last chunk. Requests are handed to the engine once per request id. Whoever stops reading has
its requests aborted. An engine that has failed or was stopped looks like a replica that died: its readers
hear `ReplicaGone`, and may go on elsewhere. Requests over which an engine may have failed enter one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from app.deployments.placement.messages import ReplicaReport
from app.deployments.replica.adapter_fetcher import AdapterFetcher
from app.deployments.replica.suspect_isolation import SuspectQueue
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.frames import FrameHub, pack_frame
from app.deployments.rpc.transport import EngineFailed, ReplicaGone
from app.deployments.rpc.uds_transport import FrameSocket
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.errors import EngineFailure, PolyloraError, QueueFull
from app.engine.interface import RunningEngine
from app.engine.request import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)

#: Adapters kept mapped in this process. They are views of shared memory: this bounds what they pin there.
MAX_MAPPED_BYTES = 256 << 20
#: Adapters that are remembered as asked for, the last that were.
MAX_ASKED = 65_536
#: How often a step is looked at that may hang.
LOOK_INTERVAL_S = 1.0
#: A link without requests ends after this long.
IDLE_S = 2.0


class EngineService:
    """Made and used on one event loop; `on_step` may be called from the engine's thread.

    `clock` gives Unix time: adapters are told by when they were used last. `max_queued_requests` is the engine's; requests that
    wait for their adapter to be fetched count as well.
    """

    def __init__(
        self,
        adapters: AdapterFetcher,
        clock: Callable[[], float],
        *,
        max_queued_requests: int,
        counting: UsageRecorder | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._adapters = adapters
        self._max_queued_requests = max_queued_requests
        self._counting = counting
        self._uncounted: dict[str, GenerateRequest] = {}  # that the engine has taken
        self._clock = clock
        self._idle_s = idle_s
        self._engine: RunningEngine | None = None
        self._loop = asyncio.get_running_loop()
        self._hub = FrameHub()
        self._mapped: OrderedDict[str, LoraAdapter] = OrderedDict()
        self._fetching: dict[tuple[str, str], asyncio.Task[LoraAdapter]] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._trials = SuspectQueue()
        self._tasks = Tasks()
        self._end: ReplicaGone | None = None
        self._active: dict[str, str] = {}  # request id -> adapter digest
        self._used_s: dict[str, float] = {}  # adapter digest -> when a request last entered with it
        self._last_used_s: dict[str, float] = {}  # the same, of those that are resident or active
        self._asked_s: dict[str, float] = {}  # adapter digest -> when a request last asked for it, by last asked
        self.changed = asyncio.Event()  # set when adapters may have moved: a report is due

    def start(self, engine: RunningEngine) -> None:
        """Serve this engine; its callback must be `on_step`."""
        self._engine = engine

    @property
    def engine(self) -> RunningEngine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    @property
    def num_links(self) -> int:
        return self._hub.num_links

    @property
    def num_waiting_for_adapters(self) -> int:
        return len(self._waiting)

    def on_step(self, chunks: list[TokenChunk]) -> None:
        """The engine's callback: any thread."""
        self._loop.call_soon_threadsafe(self._deliver, chunks)

    async def watch_steps(self, max_step_s: float) -> None:
        """Notice a step that hangs, until cancelled: its requests go on elsewhere."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self.engine.check_progress(max_step_s) and self.engine.failure is not None:
                self._hub.end(self._ended(self.engine.failure))

    async def frames(self, link_id: str) -> AsyncGenerator[list[TokenChunk]]:
        """Frames for one reader until it leaves or has been idle for a while. Raises ReplicaGone if it fails."""
        try:
            async for frame in self._hub.frames(link_id, self._idle_s):
                yield frame
        finally:
            self.abort(self._hub.detach(link_id))

    async def packed_frames(self, link_id: str, socket: FrameSocket | None) -> AsyncGenerator[bytes]:
        """`frames` as they are sent; with a socket only the first, the others go through its connection to the reader.

        A reader that closes its connection has gone: its link ends, and its requests are aborted.
        """
        leave = partial(self._hub.leave, link_id)
        async with aclosing(self.frames(link_id)) as frames:
            alone = (pack_frame(frame) async for frame in frames)
            async with aclosing(alone if socket is None else socket.carry(link_id, frames, leave)) as items:
                async for item in items:
                    yield item

    def submit(self, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        """Take requests whose chunks go to this link. False, and nothing taken, if it is not attached.

        Errors of single requests arrive as their last chunk. Raises ReplicaGone, and nothing is taken, if the
        engine has failed: another replica can serve them.
        """
        if self.engine.failure is not None:
            raise self._ended(self.engine.failure)
        if not self._hub.is_attached(link_id):
            return False
        for request in requests:
            if self._hub.owns(request.request_id):
                continue
            self._hub.expect(link_id, request.request_id)
            ref = request.adapter
            if ref is not None:
                self._asked_s.pop(ref.digest, None)
                self._asked_s[ref.digest] = self._clock()
                if len(self._asked_s) > MAX_ASKED:
                    del self._asked_s[next(iter(self._asked_s))]
            if ref is None:
                self._enter(request, None)
            elif (adapter := self._mapped.get(ref.digest)) is not None:
                self._mapped.move_to_end(ref.digest)
                self._enter(request, adapter)
            else:
                self._wait_for_adapter(request, ref)
        return True

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; no chunk of theirs is delivered any more."""
        for request_id in request_ids:
            self._hub.forget(request_id)
            self._active.pop(request_id, None)
            self._trials.forget(request_id)
            task = self._waiting.pop(request_id, None)
            if task is not None:
                task.cancel()
            else:
                self.engine.abort(request_id)

    async def drop_adapter(self, digest: str) -> int:
        """Free an adapter's rows when its last sequence has ended; returns how many rows were freed.

        This process's view of it is forgotten, too: the next request fetches it again.
        """
        self._mapped.pop(digest, None)
        return await asyncio.wrap_future(self.engine.drop_adapter(digest))

    def held(self) -> set[str]:
        """Digests of the adapters on the device, and of those that this process has mapped."""
        return {*(resident.digest for resident in self.engine.stats().residents), *self._mapped}

    def brought(self, adapter: LoraAdapter, ref: AdapterRef, written_bytes: int) -> None:
        """An adapter has come to the device without a request: a report is due."""
        self.count_load(ref, written_bytes)
        self.keep(adapter)
        self.changed.set()

    def count_load(self, ref: AdapterRef, written_bytes: int) -> None:
        """So much was written to the device for an adapter that no request had asked for."""
        if self._counting is not None:
            self._counting.record_load(ref, written_bytes)

    def keep(self, adapter: LoraAdapter) -> None:
        """Hold this process's view of an adapter, the least recently used out."""
        self._mapped[adapter.card.digest] = adapter
        self._mapped.move_to_end(adapter.card.digest)
        while len(self._mapped) > 1 and sum(a.card.size_bytes for a in self._mapped.values()) > MAX_MAPPED_BYTES:
            self._mapped.popitem(last=False)

    def take_used(self) -> dict[str, float]:
        """Adapters that requests have used since this was last asked, and when (Unix time)."""
        used_s, self._used_s = self._used_s, {}
        return used_s

    def asked_within(self, seconds: float) -> list[str]:
        """Digests of the adapters that requests asked for in the last `seconds`; those before are forgotten."""
        since_s = self._clock() - seconds
        for digest, asked_s in list(self._asked_s.items()):
            if asked_s >= since_s:
                break
            del self._asked_s[digest]
        return list(self._asked_s)

    def counts(self) -> dict[str, Any]:
        """What the engine holds and has done, for tests and operators."""
        stats = self.engine.stats()
        return {
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
        """The report for placement, from the engine's counts and what is known of requests here."""
        active = dict(Counter(self._active.values()))
        here = {*resident, *active}  # an active one may become resident only after this report
        self._last_used_s = {digest: used_s for digest, used_s in self._last_used_s.items() if digest in here}
        last_used_s = {digest: used_s for digest, used_s in self._last_used_s.items() if digest in resident}
        num_waiting += len(self._waiting) + self._trials.num_waiting
        return ReplicaReport(replica_id, num_running, num_waiting, resident, active, last_used_s)

    def _wait_for_adapter(self, request: GenerateRequest, ref: AdapterRef) -> None:
        """Fetch it beside the engine. What has had tokens already goes on, however many wait, as in the engine."""
        num_waiting = len(self._waiting) + self.engine.stats().num_waiting
        if num_waiting >= self._max_queued_requests and not request.resume_token_ids:
            reason = (
                f"{num_waiting} requests are waiting, {len(self._waiting)} of them for their adapters, and "
                f"engine.max_queued_requests is {self._max_queued_requests}; try again later"
            )
            self._fail(request.request_id, QueueFull(reason))
        else:
            self._waiting[request.request_id] = self._tasks.start(self._enter_when_fetched(request, ref))

    async def _enter_when_fetched(self, request: GenerateRequest, ref: AdapterRef) -> None:
        try:
            adapter = await self._adapter(ref)
        except Exception as error:
            self._waiting.pop(request.request_id, None)
            self._fail(request.request_id, error)
            return
        self._waiting.pop(request.request_id, None)
        self._enter(request, adapter)

    def _enter(self, request: GenerateRequest, adapter: LoraAdapter | None) -> None:
        if request.num_failures:
            self._trials.begin(request, partial(self._submit, request, adapter))
        else:
            self._submit(request, adapter)

    def _submit(self, request: GenerateRequest, adapter: LoraAdapter | None) -> bool:
        """Returns whether the engine has taken the request; if not, its client has been told, or all clients have."""
        try:
            self.engine.submit(request, adapter)
        except Exception as error:
            if (failure := self.engine.failure) is not None:
                if not failure.computing:  # else the end comes behind the last chunks
                    self._hub.end(self._ended(failure))
            else:  # one request's trouble, whatever it is, must not end the others of its group
                self._fail(request.request_id, error)
            return False
        self._uncounted[request.request_id] = request
        if adapter is not None:
            self._active[request.request_id] = adapter.card.digest
            self._used_s[adapter.card.digest] = self._last_used_s[adapter.card.digest] = self._clock()
            self.changed.set()
        return True

    async def _adapter(self, ref: AdapterRef) -> LoraAdapter:
        """One fetch per digest and source, however many wait: another tenant's source may fail, and this one not."""
        key = (ref.digest, ref.uri)
        task = self._fetching.get(key)
        if task is None:
            task = self._fetching[key] = self._tasks.start(self._fetch_and_map(ref))
        return await asyncio.shield(task)

    async def _fetch_and_map(self, ref: AdapterRef) -> LoraAdapter:
        try:
            adapter = await self._adapters.fetch(ref)
        finally:
            del self._fetching[ref.digest, ref.uri]
        self.keep(adapter)
        return adapter

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.finish_reason is not None and self._active.pop(chunk.request_id, None) is not None:
                self.changed.set()
        failure = self.engine.failure  # it may be that of a step whose chunks are yet to come
        is_over = failure is not None and any(chunk.error is failure for chunk in chunks)
        if is_over:
            chunks = [chunk for chunk in chunks if chunk.error is not failure]
        self._hub.deliver(chunks)
        for chunk in chunks:
            self._trials.heard(chunk)
            if chunk.finish_reason is not None:
                self._count(chunk)
        if failure is not None and is_over:
            self._hub.end(self._ended(failure))

    def _count(self, chunk: TokenChunk) -> None:
        """What a request has taken, once it has ended; one that goes on elsewhere is counted there."""
        request = self._uncounted.pop(chunk.request_id, None)
        if request is not None and chunk.consumption is not None and self._counting is not None:
            self._counting.record_usage(request, chunk.consumption)

    def _ended(self, failure: EngineFailure) -> ReplicaGone:
        """The error that every reader hears: nothing is computed any more, and whose fault that may be."""
        if self._end is None:
            if self._trials.current in failure.computing:
                self._end = EngineFailed(str(failure), culprit=self._trials.current)
            elif failure.computing:
                self._end = EngineFailed(str(failure), suspects=failure.computing)
            else:
                self._end = ReplicaGone(str(failure))
        return self._end

    def _fail(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, PolyloraError):
            logger.error("request %s met an unexpected error", request_id, exc_info=error)
            error = EngineFailure("internal error while admitting the request; the replica's log has the details")
        self._hub.deliver([TokenChunk(request_id, finish_reason="error", error=error)])
