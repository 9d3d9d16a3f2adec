"""One ingress's connections to replicas: which are read, and which are usable.

A connection is a long-lived reader of frames (one per engine step, with the chunks of all our streams) plus one
`submit` call per group of streams. When it ends, all its streams lose their attempt. A replica that cannot be reached
is avoided and probed without a request, with exponential backoff. Every failure of a group reaches each of its streams.
Unreachable replicas are reported to placement at most once a second; one ingress's report alone decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.dispatch.stream import Loss, ReplicaConnection, Stream
from app.deployments.placement.placer import Placer
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.transport import EngineFailed, ReplicaGone, ReplicaUnreachable, Transport

logger = logging.getLogger(__name__)

#: Time before an unreachable replica is probed; it doubles after each failed probe, up to the second number.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
#: A replica that does not attach a reader within this time counts as unreachable.
ATTACH_TIMEOUT_S = 3.0
#: How often unreachable replicas are reported to placement.
REPORT_INTERVAL_S = 1.0


class ReplicaConnections:
    """All connections of one ingress process, on one event loop. `loads` counts the streams on each replica."""

    def __init__(self, transport: Transport, placer: Placer, loads: ReplicaLoadTracker) -> None:
        self._transport = transport
        self._placer = placer
        self.loads = loads
        self._connections: dict[str, ReplicaConnection] = {}
        self._unreachable: set[str] = set()  # avoided until a probe succeeds
        self._num_failures: dict[str, int] = {}  # failed probes in a row; kept until the replica takes a request
        self._usable: dict[str, None] = {}
        self._usable_ids: list[str] = []
        self._usable_of: int | None = None  # the view's `num_replica_changes` they are computed from; None: stale
        self._tasks = Tasks()
        self._is_reporting = False
        self._waking: asyncio.Task[None] | None = None

    @property
    def num_streams(self) -> int:
        return sum(len(connection.streams) for connection in self._connections.values())

    @property
    def usable(self) -> Mapping[str, None]:
        """Replicas that may get requests."""
        view = self._placer.view
        if self._usable_of != view.num_replica_changes:
            self._usable = {each: None for each in view.replicas if each not in self._unreachable}
            self._usable_ids = [*self._usable]
            self._usable_of = view.num_replica_changes
            self.loads.retain(view.replicas)
        return self._usable

    @property
    def usable_ids(self) -> Sequence[str]:
        """`usable` as a list."""
        assert self.usable is self._usable
        return self._usable_ids

    def submit(self, replica_id: str, group: Sequence[Stream]) -> None:
        """Send a replica its streams in one call, in the background. `loads` counts them there already."""
        self._tasks.start(self._submit(replica_id, [(stream, stream.attempt) for stream in group]))

    def wake(self) -> None:
        """Start a replica if there may be none. One call at a time."""
        if self._waking is None or self._waking.done():
            self._waking = self._tasks.start(self._wake())

    def end(self, stream: Stream) -> None:
        """Close a stream and abort it on its replica."""
        stream.closed = True
        if stream.connection is not None and not stream.submitting:
            self._tasks.start(self._abort(stream.connection.replica_id, [stream.attempt_id]))
            stream.leave_connection()

    async def close(self) -> None:
        """Stop reading; open streams are left to their callers."""
        await self._tasks.close()

    async def _wake(self) -> None:
        try:
            await self._transport.wake()
        except (ReplicaGone, ReplicaUnreachable) as error:
            logger.info("a starting replica died: %s", error)

    async def _submit(self, replica_id: str, group: Sequence[tuple[Stream, int]]) -> None:
        """Submit (stream, attempt) pairs."""
        try:
            try:
                connection = await self._attached_connection(replica_id)
            finally:
                self.loads.add(replica_id, -len(group))  # from here on the connection counts them
            for stream, _ in group:
                stream.submitting = True
                connection.take(stream)
            requests = [stream.attempt_request() for stream, _ in group if not stream.closed]
            if await self._transport.submit(replica_id, connection.link_id, requests):
                self._num_failures.pop(replica_id, None)
            else:
                self._drop(connection, Loss.LINK_ENDED)
                _lose_attempts(group)
        except EngineFailed:
            # The reader gets the failure too, after the last tokens; other attempts continue from those.
            self._back_off(replica_id)
            _lose_attempts(group)
        except (ReplicaGone, ReplicaUnreachable) as error:
            self._mark_unreachable(replica_id, error)
            _lose_attempts(group)  # no effect on those lost with the connection
        except Exception as error:
            for stream, attempt in group:
                if stream.attempt == attempt:
                    stream.fail(error)
        for stream, attempt in group:
            if stream.attempt == attempt:
                stream.submitting = False
                if stream.closed:
                    self.end(stream)

    async def _attached_connection(self, replica_id: str) -> ReplicaConnection:
        """The replica's current, attached connection. Raises ReplicaUnreachable."""
        while True:
            connection = self._connections.get(replica_id)
            if connection is None:
                connection = ReplicaConnection(replica_id, lambda by: self.loads.add(replica_id, by))
                self._connections[replica_id] = connection
                connection.reader = self._tasks.start(self._read(connection))
            try:
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    await connection.settled.wait()
            except TimeoutError:
                raise ReplicaUnreachable(f"{replica_id} did not attach within {ATTACH_TIMEOUT_S:g} s") from None
            if not connection.is_attached:
                raise ReplicaUnreachable(f"replica {replica_id} closed the stream")
            if self._connections.get(replica_id) is connection:
                return connection

    async def _read(self, connection: ReplicaConnection) -> None:
        """Deliver frames until the connection ends; then its remaining streams lose their attempt."""
        try:
            async for frame in self._transport.frames(connection.replica_id, connection.link_id):
                connection.mark_attached()
                for chunk in frame:
                    connection.deliver(chunk)
        except (ReplicaGone, ReplicaUnreachable) as error:
            if isinstance(error, ReplicaUnreachable) and connection.streams:  # it may live, and would compute them all
                self._tasks.start(self._abort(connection.replica_id, [*connection.streams]))
            self._mark_unreachable(connection.replica_id, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A bug: log it, and move the streams to other replicas.
            logger.exception("reading frames of replica %s failed", connection.replica_id)
            self._mark_unreachable(connection.replica_id, ReplicaUnreachable(str(error)))
            self._drop(connection, Loss.READER_FAILED)
        finally:
            self._drop(connection, Loss.LINK_ENDED)

    def _mark_unreachable(self, replica_id: str, error: ReplicaGone | ReplicaUnreachable) -> None:
        """Avoid a replica. One that drains keeps its connection, so its running streams can finish."""
        connection = self._connections.get(replica_id)
        if connection is not None and isinstance(error, ReplicaGone):
            end = Loss.REPLICA_STOPPED if connection.draining else Loss.REPLICA_DIED
            self._drop(connection, error if isinstance(error, EngineFailed) else end)
        elif connection is not None:
            connection.draining = True
        logger.info("replica %s: %s", replica_id, error)
        self._back_off(replica_id)

    def _back_off(self, replica_id: str) -> None:
        if replica_id in self._unreachable:
            return  # it is being probed
        self._unreachable.add(replica_id)
        self._usable_of = None
        self._tasks.start(self._probe(replica_id))
        if not self._is_reporting:
            self._is_reporting = True
            self._tasks.start(self._report_unreachable())

    async def _probe(self, replica_id: str) -> None:
        """Call the replica without a request until it answers, or has left the table."""
        num_failures = self._num_failures.pop(replica_id, 0)
        try:
            while True:
                await asyncio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_failures, 10)))
                num_failures += 1
                if replica_id not in self._placer.view.replicas:
                    return
                try:
                    connection = await self._attached_connection(replica_id)
                    if await self._transport.submit(replica_id, connection.link_id, []):
                        connection.draining = False
                        self._num_failures[replica_id] = num_failures
                        return
                except (ReplicaGone, ReplicaUnreachable) as error:
                    self._mark_unreachable(replica_id, error)
                except Exception:
                    logger.exception("probing replica %s failed", replica_id)
        finally:
            self._unreachable.discard(replica_id)
            self._usable_of = None

    async def _report_unreachable(self) -> None:
        """Report unreachable replicas to placement until there are none, then the empty list once."""
        try:
            has_unreachable = True
            while self._unreachable or has_unreachable:
                has_unreachable = bool(self._unreachable)
                await self._placer.report_unreachable(sorted(self._unreachable))
                await asyncio.sleep(REPORT_INTERVAL_S)
        finally:
            self._is_reporting = False

    def _drop(self, connection: ReplicaConnection, loss: Loss | EngineFailed) -> None:
        """Remove a connection, once; all its streams lose their attempt."""
        if self._connections.get(connection.replica_id) is not connection:
            return
        del self._connections[connection.replica_id]
        connection.settled.set()
        connection.lose_all(loss)
        if connection.reader is not None and connection.reader is not asyncio.current_task():
            connection.reader.cancel()

    async def _abort(self, replica_id: str, attempt_ids: Sequence[str]) -> None:
        with suppress(ReplicaGone, ReplicaUnreachable):  # nothing left to abort
            await self._transport.abort(replica_id, attempt_ids)


def _lose_attempts(group: Sequence[tuple[Stream, int]]) -> None:
    for stream, attempt in group:
        stream.lose(attempt, Loss.LINK_ENDED)
