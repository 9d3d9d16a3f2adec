"""The links of one ingress to its replicas: who is read, and who can be used.

In: groups of streams for one replica each. Out: their chunks in their inboxes. A link is a long-lived reader of frames
(one frame per engine step, with the chunks of all our streams) and one `submit` call per group. When a link ends, all
its streams are told that their attempt is lost. A replica that cannot be reached is left alone, and tried again without
a stream, after twice as long each time. Rule: whatever goes wrong with a group, every stream of it hears of it; and
that this process cannot reach a replica is said to placement, once a second at most, and decides nothing for others.
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

#: A replica that could not be reached is left alone for this long, and twice as long after each trial that fails.
AVOID_S, MAX_AVOID_S = 0.5, 8.0
#: A replica attaches a reader within this time, or counts as unreachable.
ATTACH_TIMEOUT_S = 3.0
#: How often placement is told which replicas cannot be reached, while there are any.
TELL_INTERVAL_S = 1.0


class ReplicaConnections:
    """All links of one ingress process, on one event loop. `loads` is told of every stream that comes and goes."""

    def __init__(self, transport: Transport, placer: Placer, loads: ReplicaLoadTracker) -> None:
        self._transport = transport
        self._placer = placer
        self.loads = loads
        self._links: dict[str, ReplicaConnection] = {}
        self._avoided: set[str] = set()  # replicas that are left alone
        self._num_failures: dict[str, int] = {}  # replicas tried again with success: failures in a row
        self._usable: dict[str, None] = {}
        self._usable_ids: list[str] = []
        self._usable_of: int | None = None  # the state of the view that they are computed from; None: compute them
        self._tasks = Tasks()
        self._telling = False
        self._waking: asyncio.Task[None] | None = None

    @property
    def num_streams(self) -> int:
        """Streams that wait for chunks."""
        return sum(len(link.streams) for link in self._links.values())

    @property
    def usable(self) -> Mapping[str, None]:
        """The replicas that requests may be given to."""
        view = self._placer.view
        if self._usable_of != view.num_replica_changes:
            self._usable = {each: None for each in view.replicas if each not in self._avoided}
            self._usable_ids = [*self._usable]
            self._usable_of = view.num_replica_changes
            self.loads.keep(view.replicas)
        return self._usable

    @property
    def usable_ids(self) -> Sequence[str]:
        """The same, in a list."""
        assert self.usable is self._usable
        return self._usable_ids

    def submit(self, replica_id: str, group: Sequence[Stream]) -> None:
        """Give one replica its streams, in one call that nobody waits for. `loads` counts them there already."""
        self._tasks.start(self._submit(replica_id, [(stream, stream.attempt) for stream in group]))

    def wake(self) -> None:
        """Requests wait and there is no replica: have one started if there may be none. One call at a time."""
        if self._waking is None or self._waking.done():
            self._waking = self._tasks.start(self._wake())

    def end(self, stream: Stream) -> None:
        """Nobody reads a stream any more: its replica, if it still computes it, is told to stop."""
        stream.closed = True
        if stream.link is not None and not stream.submitting:
            self._tasks.start(self._abort(stream.link.replica_id, stream.attempt_id))
            stream.leave_link()

    async def close(self) -> None:
        """Stop reading; streams that are still open are left to their callers."""
        await self._tasks.close()

    async def _wake(self) -> None:
        try:
            await self._transport.wake()
        except (ReplicaGone, ReplicaUnreachable) as error:
            logger.info("a replica that was being started has gone: %s", error)

    async def _submit(self, replica_id: str, group: Sequence[tuple[Stream, int]]) -> None:
        """Submit streams, each in the attempt that is named with it."""
        try:
            try:
                link = await self._attached_link(replica_id)
            finally:
                self.loads.change(replica_id, -len(group))  # from here on the link counts them
            for stream, _ in group:
                stream.submitting = True
                link.take(stream)
            requests = [stream.attempt_request() for stream, _ in group if not stream.closed]
            if await self._transport.submit(replica_id, link.link_id, requests):
                self._num_failures.pop(replica_id, None)
            else:
                self._drop(link, Loss.LINK_ENDED)
                _lose(group)
        except EngineFailed:
            # The link's reader hears it, too, behind the tokens that came before, from which the others go on.
            self._leave_alone(replica_id)
            _lose(group)
        except (ReplicaGone, ReplicaUnreachable) as error:
            self._avoid(replica_id, error)
            _lose(group)  # unless they went with the link
        except Exception as error:
            for stream, attempt in group:
                if stream.attempt == attempt:
                    stream.fail(error)
        for stream, attempt in group:
            if stream.attempt == attempt:
                stream.submitting = False
                if stream.closed:
                    self.end(stream)

    async def _attached_link(self, replica_id: str) -> ReplicaConnection:
        """The link that is read at this moment: not one that ended while we waited for it."""
        while True:
            link = self._links.get(replica_id)
            if link is None:
                link = ReplicaConnection(replica_id, lambda by: self.loads.change(replica_id, by))
                self._links[replica_id] = link
                link.reader = self._tasks.start(self._read(link))
            try:
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    await link.settled.wait()
            except TimeoutError:
                raise ReplicaUnreachable(f"{replica_id} did not attach within {ATTACH_TIMEOUT_S:g} s") from None
            if not link.is_attached:
                raise ReplicaUnreachable(f"replica {replica_id} closed the stream")
            if self._links.get(replica_id) is link:
                return link

    async def _read(self, link: ReplicaConnection) -> None:
        """Deliver frames until the link ends, then have every stream that still waits on it attempted again."""
        try:
            async for frame in self._transport.frames(link.replica_id, link.link_id):
                link.attached()
                for chunk in frame:
                    link.deliver(chunk)
        except (ReplicaGone, ReplicaUnreachable) as error:
            self._avoid(link.replica_id, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Not a death we know. The streams are moved all the same; the bug must be seen.
            logger.exception("reading frames of replica %s failed", link.replica_id)
            self._avoid(link.replica_id, ReplicaUnreachable(str(error)))
            self._drop(link, Loss.READER_FAILED)
        finally:
            self._drop(link, Loss.LINK_ENDED)

    def _avoid(self, replica_id: str, error: ReplicaGone | ReplicaUnreachable) -> None:
        """Leave a replica alone that takes no requests.

        One that merely drains keeps its link: what it still computes is delivered.
        """
        link = self._links.get(replica_id)
        if link is not None and isinstance(error, ReplicaGone):
            end = Loss.REPLICA_STOPPED if link.draining else Loss.REPLICA_DIED
            self._drop(link, error if isinstance(error, EngineFailed) else end)
        elif link is not None:
            link.draining = True
        logger.info("replica %s: %s", replica_id, error)
        self._leave_alone(replica_id)

    def _leave_alone(self, replica_id: str) -> None:
        if replica_id in self._avoided:
            return  # it is being tried
        self._avoided.add(replica_id)
        self._usable_of = None
        self._tasks.start(self._try_again(replica_id))
        if not self._telling:
            self._telling = True
            self._tasks.start(self._tell())

    async def _try_again(self, replica_id: str) -> None:
        """Until a replica takes a call again, without any request in it, or is off the table."""
        num_failures = self._num_failures.pop(replica_id, 0)
        try:
            while True:
                await asyncio.sleep(min(MAX_AVOID_S, AVOID_S * 2 ** min(num_failures, 10)))
                num_failures += 1
                if replica_id not in self._placer.view.replicas:
                    return
                try:
                    link = await self._attached_link(replica_id)
                    if await self._transport.submit(replica_id, link.link_id, []):
                        link.draining = False
                        self._num_failures[replica_id] = num_failures  # until it takes a request
                        return
                except (ReplicaGone, ReplicaUnreachable) as error:
                    self._avoid(replica_id, error)
                except Exception:
                    logger.exception("trying replica %s again failed", replica_id)
        finally:
            self._avoided.discard(replica_id)
            self._usable_of = None

    async def _tell(self) -> None:
        """Say which replicas cannot be reached until all can be."""
        try:
            is_told = True
            while self._avoided or is_told:
                is_told = bool(self._avoided)
                await self._placer.report_unreachable(sorted(self._avoided))
                await asyncio.sleep(TELL_INTERVAL_S)
        finally:
            self._telling = False

    def _drop(self, link: ReplicaConnection, loss: Loss | EngineFailed) -> None:
        """End a link, once: nobody submits to it any more, and all its streams are lost."""
        if self._links.get(link.replica_id) is not link:
            return
        del self._links[link.replica_id]
        link.settled.set()
        link.lose_all(loss)
        if link.reader is not None and link.reader is not asyncio.current_task():
            link.reader.cancel()

    async def _abort(self, replica_id: str, attempt_id: str) -> None:
        with suppress(ReplicaGone, ReplicaUnreachable):  # then there is nothing left to abort
            await self._transport.abort(replica_id, [attempt_id])


def _lose(group: Sequence[tuple[Stream, int]]) -> None:
    for stream, attempt in group:
        stream.lose(attempt, Loss.LINK_ENDED)
