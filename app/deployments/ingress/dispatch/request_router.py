"""Router: chooses the replica of each stream, in one decision for streams that arrived together.

Each replica gets one call with all its streams; a stream that no replica takes gets the error in its inbox. Nothing
here blocks: streams for the base model and for adapters with assigned replicas are routed at once. Streams whose
adapter has none wait for placement in a background task, and so do streams while no replica is usable; the first of
those starts a replica. A replica that had no room for a stream is not tried again for it until the stream loses an
attempt. The cost per stream does not depend on the number of replicas.
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

#: Streams without a usable replica are retried at least this often.
RETRY_S = 0.25


class RequestRouter:
    """One per ingress. `replica_timeout_s` is how long streams wait for the first usable replica.

    `draw` breaks ties between replicas. `prefix_of` gives the key of a request's prompt prefix (`PrefixHasher`).
    """

    def __init__(
        self,
        connections: ReplicaConnections,
        placer: Placer,
        policy: PlacementPolicy,
        clock: Callable[[], float],
        draw: random.Random,
        replica_timeout_s: float,
        prefix_of: Callable[[GenerateRequest], str | None],
    ) -> None:
        self._connections = connections
        self._placer = placer
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._prefix_of = prefix_of
        self.replica_timeout_s = replica_timeout_s
        self._awaiting_placement: dict[str, list[Stream]] = {}  # digest -> streams
        self._awaiting_replica: list[tuple[Stream, float]] = []  # and since when
        self._tasks = Tasks()
        self._is_placing = self._is_retrying = False

    def assign(self, streams: Sequence[Stream]) -> None:
        """Give each stream to a replica, now or once there is one; errors arrive in its inbox.

        Returning does not mean that the stream has reached its replica; a failure to do so arrives in its inbox, too. A
        stream that every replica has rejected gets the last rejection, and NotReady if there is no replica within
        `replica_timeout_s`.
        """
        placeable = []
        for stream in streams:
            digest = _digest(stream)
            if digest is not None and self._policy.has_affinity and not self._placer.view.assigned_replicas(digest):
                self._awaiting_placement.setdefault(digest, []).append(stream)
            else:
                placeable.append(stream)
        self._place(placeable)
        if self._awaiting_placement and not self._is_placing:
            self._is_placing = True
            self._tasks.start(self._request_placement())

    async def close(self) -> None:
        """Stop; waiting streams are left to their callers."""
        await self._tasks.close()

    async def _request_placement(self) -> None:
        """Ask placement once for all waiting digests; streams that arrive meanwhile are in the next call."""
        try:
            while self._awaiting_placement:
                waiting, self._awaiting_placement = self._awaiting_placement, {}
                await self._placer.assign(sorted(waiting))
                self._place(stream for streams in waiting.values() for stream in streams)
        finally:
            self._is_placing = False

    async def _retry_awaiting_replica(self) -> None:
        """Retry streams without a usable replica until each has one or has timed out."""
        try:
            while self._awaiting_replica:
                await self._placer.wait_for_change(RETRY_S)
                now_s, awaiting, self._awaiting_replica = self._clock(), self._awaiting_replica, []
                if self._connections.usable:
                    self.assign([stream for stream, _ in awaiting])
                    continue
                for stream, at_s in awaiting:
                    if stream.closed:
                        continue
                    if now_s - at_s < self.replica_timeout_s:
                        self._awaiting_replica.append((stream, at_s))
                        self._connections.wake()
                    else:
                        reason = f"no engine replica became ready within {self.replica_timeout_s:g} s"
                        stream.inbox.put(NotReady(reason, retry_after_s=5))
        finally:
            self._is_retrying = False

    def _place(self, streams: Iterable[Stream]) -> None:
        groups: dict[str, list[Stream]] = {}
        for stream in streams:
            if stream.closed:
                continue
            if not self._connections.usable:
                self._await_replica(stream)
            elif (replica_id := self._choose(stream)) is not None:
                self._connections.loads.add(replica_id, +1)
                groups.setdefault(replica_id, []).append(stream)
            else:
                stream.inbox.put(next(reversed(stream.refusals.values())))
        for replica_id, group in groups.items():
            self._connections.submit(replica_id, group)

    def _choose(self, stream: Stream) -> str | None:
        """None if every replica has rejected the stream."""
        usable, digest = self._connections.usable, _digest(stream)
        if stream.refusals:
            usable = {replica_id: None for replica_id in usable if replica_id not in stream.refusals}
        if not usable:
            return None
        anywhere = [*usable] if stream.refusals else self._connections.usable_ids
        prefix = partial(self._prefix_of, stream.request)
        return choose_replica(
            digest,
            self._placer.view,
            self._policy,
            usable,
            anywhere,
            self._connections.loads.num_requests,
            self._draw,
            prefix,
        )

    def _await_replica(self, stream: Stream) -> None:
        self._awaiting_replica.append((stream, self._clock()))
        self._connections.wake()
        if not self._is_retrying:
            self._is_retrying = True
            self._tasks.start(self._retry_awaiting_replica())


class PrefixHasher:
    """Keys of prompt prefixes, equal to the keys of engines' cached prefixes (`prefix_key`), in hexadecimal.

    For one base model; `block_size` is that of the engines' KV blocks.
    """

    def __init__(self, base_digest: str, block_size: int) -> None:
        self._base_digest = base_digest
        self._block_size = block_size

    def of(self, request: GenerateRequest) -> str | None:
        """None for prompts that are too short, and for embeddings, whose texts rarely share a prefix."""
        if request.pooling is not None:
            return None
        digest = None if request.adapter is None else request.adapter.digest
        prefix = prefix_key(self._base_digest, digest, request.cache_salt, request.token_ids, self._block_size)
        return None if prefix is None else prefix.hex()


def _digest(stream: Stream) -> str | None:
    return None if stream.request.adapter is None else stream.request.adapter.digest
