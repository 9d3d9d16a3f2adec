"""What the dispatcher needs from the world: a way to the replicas, and somebody who knows where adapters live.

In: requests for one replica, adapters that need a home. Out: frames of chunks, a placement table; or one of the two
errors with which a call ends that finds no replica. Protocols only: `serve_transport` implements them over Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from app.deployments.placement.books import PlacementTable
from app.engine.request import GenerateRequest, TokenChunk

Frame = Sequence[TokenChunk]


class ReplicaGone(Exception):
    """The replica died, or its engine did; or its connection was lost, which looks the same from here."""


class EngineFailed(ReplicaGone):
    """Its engine failed in a step: over `culprit`, which was on trial in it; if none was, over one of `suspects`."""

    def __init__(self, message: str, suspects: Iterable[str] = (), culprit: str | None = None) -> None:
        super().__init__(message)
        self.suspects = frozenset(suspects)
        self.culprit = culprit


class ReplicaUnreachable(Exception):
    """No way to the replica at the moment: not announced yet, draining, or already replaced."""


class ReplicaLeaving(ReplicaUnreachable):
    """It was announced and is no more: it drains, or has been replaced."""


class Transport(Protocol):
    """How this process talks to engine replicas. Every method raises ReplicaGone or ReplicaUnreachable.

    A `link_id` names one reader for its whole life and is never used again.
    """

    def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        """The first frame is empty: we are attached. Ends when the replica has had nothing for us for a while."""
        ...

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        """Hand requests over; False if that link is not attached. A request id that is known is not taken twice."""
        ...

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None: ...


class Placer(Protocol):
    """What the dispatcher asks of placement: the table, and homes for adapters that have none."""

    @property
    def table(self) -> PlacementTable: ...

    async def assign(self, digests: Sequence[str]) -> None:
        """Find homes for these adapters; returns (not raises) when nobody can be asked."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Wait for a new table, at most this long."""
        ...

    async def gone(self, replica_id: str) -> None:
        """Tell the others that a replica is not to be used for now."""
        ...
