"""The links of one ingress to its replicas: who is read, and who can be used.

In: groups of streams for one replica each. Out: their chunks in their inboxes. A link is a long-lived reader of frames
(one frame per engine step, with the chunks of all our streams) and one `submit` call per group. When a link ends, all
its streams are told that their attempt is lost. Rule: whatever goes wrong with a group, every stream of it hears of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from app.deployments.ingress.streams import Link, Stream
from app.deployments.links.tasks import Tasks
from app.deployments.links.transport import (
    EngineFailed,
    ReplicaGone,
    ReplicaLeaving,
    ReplicaUnreachable,
    Transport,
)
from app.deployments.placement.placer import Placer

logger = logging.getLogger(__name__)

#: A replica that could not be reached is left alone for this long.
AVOID_S = 0.5
#: A replica attaches a reader within this time, or counts as unreachable.
ATTACH_TIMEOUT_S = 10.0


class Links:
    """All links of one ingress process, on one event loop. `clock` gives seconds and never goes back."""

    def __init__(self, transport: Transport, placer: Placer, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._placer = placer
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._on_the_way: Counter[str] = Counter()  # per replica, streams that are not yet on its link
        self._avoid_until_s: dict[str, float] = {}
        self._tasks = Tasks()

    @property
    def num_streams(self) -> int:
        """Streams that wait for chunks."""
        return sum(len(link.streams) for link in self._links.values())

    @property
    def inflight(self) -> dict[str, int]:
        """Streams per replica, those on the way to it among them; replicas without streams are left out."""
        on_links = {replica_id: len(link.streams) for replica_id, link in self._links.items()}
        return dict(self._on_the_way + Counter(on_links))

    def usable_loads(self) -> dict[str, int]:
        """Requests in flight per usable replica: our own, or those that it last reported if they are more."""
        now_s, inflight = self._clock(), self.inflight
        return {
            replica_id: max(inflight.get(replica_id, 0), report.load)
            for replica_id, report in self._placer.table.replicas.items()
            if self._avoid_until_s.get(replica_id, 0.0) <= now_s
        }

    def submit(self, replica_id: str, group: Sequence[Stream]) -> None:
        """Give one replica its streams, in one call that nobody waits for."""
        self._on_the_way[replica_id] += len(group)
        self._tasks.start(self._submit(replica_id, [(stream, stream.attempt) for stream in group]))

    def end(self, stream: Stream) -> None:
        """Nobody reads a stream any more: its replica, if it still computes it, is told to stop."""
        stream.closed = True
        if stream.link is not None and not stream.submitting:
            self._tasks.start(self._abort(stream.link.replica_id, stream.attempt_id))
            stream.leave_link()

    async def close(self) -> None:
        """Stop reading; streams that are still open are left to their callers."""
        await self._tasks.close()

    async def _submit(self, replica_id: str, group: Sequence[tuple[Stream, int]]) -> None:
        """Submit streams, each in the attempt that is named with it."""
        try:
            try:
                link = await self._attached_link(replica_id)
            finally:
                self._on_the_way -= Counter({replica_id: len(group)})
            for stream, _ in group:
                stream.submitting = True
                link.take(stream)
            requests = [stream.attempt_request() for stream, _ in group if not stream.closed]
            if not await self._transport.submit(replica_id, link.link_id, requests):
                self._drop(link)
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

    async def _attached_link(self, replica_id: str) -> Link:
        """The link that is read at this moment: not one that ended while we waited for it."""
        while True:
            link = self._links.get(replica_id)
            if link is None:
                link = self._links[replica_id] = Link(replica_id)
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

    async def _read(self, link: Link) -> None:
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
            self._drop(link, died=True)
        finally:
            self._drop(link)

    def _avoid(self, replica_id: str, error: ReplicaGone | ReplicaUnreachable) -> None:
        """Leave a replica alone that takes no requests, and tell everybody if it died, leaves or once was ours.

        One that was never ours may only be new to us. One that merely drains keeps its link: what it still computes is
        delivered.
        """
        link = self._links.get(replica_id)
        was_attached = link is not None and link.is_attached
        if link is not None and isinstance(error, ReplicaGone):
            failure = error if isinstance(error, EngineFailed) else None
            self._drop(link, died=failure is None and not link.draining, failure=failure)
        elif link is not None:
            link.draining = True
        self._leave_alone(replica_id)
        logger.info("replica %s: %s", replica_id, error)
        if isinstance(error, ReplicaGone | ReplicaLeaving) or was_attached:
            self._tasks.start(self._placer.gone(replica_id))

    def _leave_alone(self, replica_id: str) -> None:
        self._avoid_until_s = {r: t for r, t in self._avoid_until_s.items() if r in self._placer.table.replicas}
        self._avoid_until_s[replica_id] = self._clock() + AVOID_S

    def _drop(self, link: Link, *, died: bool = False, failure: EngineFailed | None = None) -> None:
        """End a link, once: nobody submits to it any more, and all its streams are lost."""
        if self._links.get(link.replica_id) is not link:
            return
        del self._links[link.replica_id]
        link.settled.set()
        link.lose_all(died=died, failure=failure)
        if link.reader is not None and link.reader is not asyncio.current_task():
            link.reader.cancel()

    async def _abort(self, replica_id: str, attempt_id: str) -> None:
        with suppress(ReplicaGone, ReplicaUnreachable):  # then there is nothing left to abort
            await self._transport.abort(replica_id, [attempt_id])


def _lose(group: Sequence[tuple[Stream, int]]) -> None:
    for stream, attempt in group:
        stream.lose(attempt)
