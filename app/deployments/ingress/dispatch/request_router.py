"""Which replica computes which stream: one decision for streams that arrived together.

In: streams, where adapters are and how loaded replicas are. Out: one call per replica, with all its streams; why no
replica takes a stream is put in its inbox. Rule: nobody waits here. Streams for the base and for adapters that have a
home go to their replicas at once; those for adapters without a home wait for placement's answer in a task of their own,
as those do that no replica can take now; where there is none at all, the first of them has one started. A replica that
had no room for a stream is not asked again for it, until a replica that had it is lost. What a stream costs does not
depend on the number of replicas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.placement.placer import Placer
from app.deployments.placement.policy import PlacementPolicy
from app.deployments.placement.replica_choice import choose_replica
from app.deployments.rpc.background_tasks import Tasks
from app.engine.errors import NotReady
from app.engine.pools.block_pool import prefix_key
from app.engine.request import GenerateRequest

#: Streams that no replica can take are tried again at least this often.
RETRY_S = 0.25


class RequestRouter:
    """One per ingress. `replica_timeout_s` is how long streams wait for the first replica that can be used.

    `draw` decides between equal replicas. `head_of` names what a request's prompt begins with (`PrefixHasher`).
    """

    def __init__(
        self,
        links: ReplicaConnections,
        placer: Placer,
        policy: PlacementPolicy,
        clock: Callable[[], float],
        draw: random.Random,
        replica_timeout_s: float,
        head_of: Callable[[GenerateRequest], str | None],
    ) -> None:
        self._links = links
        self._placer = placer
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._head_of = head_of
        self.replica_timeout_s = replica_timeout_s
        self._homeless: dict[str, list[Stream]] = {}  # by digest: those that wait for a home
        self._stranded: list[tuple[Stream, float]] = []  # those that wait for a replica, and since when
        self._tasks = Tasks()
        self._asking = self._waiting = False

    def assign(self, streams: Sequence[Stream]) -> None:
        """Give each stream to a replica, now or when there is one; an error for it comes through its inbox.

        That a stream was given to a replica does not say that it arrived there: that is in its inbox, too. A stream
        that each replica has refused gets the last refusal, and NotReady if there is no replica within
        `replica_timeout_s`.
        """
        known = []
        for stream in streams:
            digest = _digest(stream)
            if digest is not None and self._policy.has_affinity and not self._placer.view.assigned_replicas(digest):
                self._homeless.setdefault(digest, []).append(stream)
            else:
                known.append(stream)
        self._place(known)
        if self._homeless and not self._asking:
            self._asking = True
            self._tasks.start(self._find_homes())

    async def close(self) -> None:
        """Leave what waits to its callers."""
        await self._tasks.close()

    async def _find_homes(self) -> None:
        """Ask placement once for all that wait; those that come meanwhile are in the next question."""
        try:
            while self._homeless:
                waiting, self._homeless = self._homeless, {}
                await self._placer.assign(sorted(waiting))
                self._place(stream for streams in waiting.values() for stream in streams)
        finally:
            self._asking = False

    async def _find_replicas(self) -> None:
        """Try those again that no replica could take, until each has one or has waited for too long."""
        try:
            while self._stranded:
                await self._placer.wait_for_change(RETRY_S)
                now_s, stranded, self._stranded = self._clock(), self._stranded, []
                if self._links.usable:
                    self.assign([stream for stream, _ in stranded])
                    continue
                for stream, at_s in stranded:
                    if stream.closed:
                        continue
                    if now_s - at_s < self.replica_timeout_s:
                        self._stranded.append((stream, at_s))
                        self._links.wake()
                    else:
                        reason = f"no engine replica became ready within {self.replica_timeout_s:g} s"
                        stream.inbox.put(NotReady(reason, retry_after_s=5))
        finally:
            self._waiting = False

    def _place(self, streams: Iterable[Stream]) -> None:
        groups: dict[str, list[Stream]] = {}
        for stream in streams:
            if stream.closed:
                continue
            if not self._links.usable:
                self._strand(stream)
            elif (replica_id := self._choose(stream)) is not None:
                self._links.loads.change(replica_id, +1)
                groups.setdefault(replica_id, []).append(stream)
            else:
                stream.inbox.put(next(reversed(stream.refusals.values())))
        for replica_id, group in groups.items():
            self._links.submit(replica_id, group)

    def _choose(self, stream: Stream) -> str | None:
        """None: every replica has refused the stream."""
        usable, digest = self._links.usable, _digest(stream)
        if stream.refusals:
            usable = {replica_id: None for replica_id in usable if replica_id not in stream.refusals}
        if not usable:
            return None
        anywhere = [*usable] if stream.refusals else self._links.usable_ids
        head = partial(self._head_of, stream.request)
        return choose_replica(
            digest, self._placer.view, self._policy, usable, anywhere, self._links.loads.of, self._draw, head
        )

    def _strand(self, stream: Stream) -> None:
        self._stranded.append((stream, self._clock()))
        self._links.wake()
        if not self._waiting:
            self._waiting = True
            self._tasks.start(self._find_replicas())


class PrefixHasher:
    """Names what a request's prompt begins with as engines name what they have cached (`prefix_key`).

    The names are hexadecimal digits, as placement's table has them, for one base model; `block_size` is that of the
    engines' KV blocks.
    """

    def __init__(self, base_digest: str, block_size: int) -> None:
        self._base_digest = base_digest
        self._block_size = block_size

    def of(self, request: GenerateRequest) -> str | None:
        """None for a prompt that is too short, and for texts to embed: they are alike seldom."""
        if request.pooling is not None:
            return None
        digest = None if request.adapter is None else request.adapter.digest
        head = prefix_key(self._base_digest, digest, request.cache_salt, request.token_ids, self._block_size)
        return None if head is None else head.hex()


def _digest(stream: Stream) -> str | None:
    return None if stream.request.adapter is None else stream.request.adapter.digest
