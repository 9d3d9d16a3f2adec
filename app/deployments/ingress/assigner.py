"""Which replica computes which stream: one decision for streams that arrived together.

In: streams, the placement table and the loads of replicas. Out: one call per replica, with all its streams. An adapter
that has no home gets one from placement first. Rule: a replica that had no room for a stream is not asked again for it,
until a replica that had it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.deployments.ingress.links import AVOID_S, Links
from app.deployments.ingress.streams import Stream
from app.deployments.placement.placer import Placer
from app.deployments.placement.policies.policy import PlacementPolicy, choose_replica
from app.engine.errors import NotReady


class Assigner:
    """One per ingress. `replica_wait_s` is how long streams wait for the first replica that can be used."""

    def __init__(
        self, links: Links, placer: Placer, policy: PlacementPolicy, clock: Callable[[], float], replica_wait_s: float
    ) -> None:
        self._links = links
        self._placer = placer
        self._policy = policy
        self._clock = clock
        self.replica_wait_s = replica_wait_s

    async def assign(self, streams: Sequence[Stream]) -> list[Exception | None]:
        """Give each stream to a replica. Returns for each None, or why no replica takes it.

        That a stream was given to a replica does not say that it arrived there: what becomes of it is in its inbox, so
        that nobody waits for a replica that is slow to answer. A stream that each replica has refused gets the last
        refusal.
        """
        try:
            loads = await self._wait_for_replicas()
        except NotReady as error:
            return [error for _ in streams]
        wanted = {s.request.adapter.digest for s in streams if s.request.adapter and not s.closed}
        if self._policy.has_homes and (unknown := wanted.difference(self._placer.table.homes)):
            await self._placer.assign(sorted(unknown))
        groups: dict[str, list[Stream]] = {}
        errors: list[Exception | None] = [None for _ in streams]
        for index, stream in enumerate(streams):
            if stream.closed:
                continue
            digest = stream.request.adapter.digest if stream.request.adapter else None
            untried = {replica_id: load for replica_id, load in loads.items() if replica_id not in stream.refusals}
            replica_id = choose_replica(digest, self._placer.table, untried, self._policy)
            if replica_id is None:
                errors[index] = next(reversed(stream.refusals.values()))
                continue
            loads[replica_id] += 1
            groups.setdefault(replica_id, []).append(stream)
        for replica_id, group in groups.items():
            self._links.submit(replica_id, group)
        return errors

    async def _wait_for_replicas(self) -> dict[str, int]:
        deadline_s = self._clock() + self.replica_wait_s
        while not (loads := self._links.usable_loads()):
            if self._clock() >= deadline_s:
                raise NotReady(f"no engine replica became ready within {self.replica_wait_s:g} s", retry_after_s=5)
            await self._placer.changed(AVOID_S / 2)
        return loads
