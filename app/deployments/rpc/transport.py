"""How an ingress talks to engine replicas, as a protocol, and the errors with which a call to one ends.

In: requests for one replica. Out: frames of chunks, or an error that says how the replica was lost. There is nothing
but the protocol here: `serve_transport` implements it over Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

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

    async def wake(self) -> None:
        """Have a replica started where there is none and there may be; returns when one answers."""
        ...


class ReplicaClient(Transport, Protocol):
    """A transport with the calls that carry no request (`ServeTransport`)."""

    async def unload_adapter(self, replica_id: str, digest: str) -> int:
        """Free an adapter's rows when no sequence uses them; returns how many rows were freed."""
        ...

    async def stats(self, replica_id: str) -> dict[str, Any]:
        """Counts, for tests and operators."""
        ...
