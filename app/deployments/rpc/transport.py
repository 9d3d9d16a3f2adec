"""The interface between ingress and replicas, and the errors of lost replicas; `serve_transport` implements it over
Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from app.engine.request import GenerateRequest, TokenChunk

Frame = Sequence[TokenChunk]

#: Protocol number of calls and messages between a service's processes. It is part of actors' names and of the links'
#: handshake, so processes with different numbers never talk; releases with the same number work together during an
#: upgrade. Raise it when a call, a message or the meaning of a field changes, from the first release on.
PROTOCOL = 1


class ReplicaGone(Exception):
    """The replica, its engine or the connection died; the ingress cannot tell which."""


class EngineFailed(ReplicaGone):
    """The replica's engine failed in a step because of `culprit`, which was on trial, or else one of `suspects`."""

    def __init__(self, message: str, suspects: Iterable[str] = (), culprit: str | None = None) -> None:
        super().__init__(message)
        self.suspects = frozenset(suspects)
        self.culprit = culprit


class ReplicaUnreachable(Exception):
    """The replica cannot be reached now: not announced yet, draining, or already replaced."""


class ReplicaLeaving(ReplicaUnreachable):
    """The replica was announced before: it drains, or has been replaced."""


def check_protocol(protocol: int) -> None:
    """Raise ReplicaUnreachable for another protocol than ours."""
    if protocol != PROTOCOL:
        raise ReplicaUnreachable(
            f"the ingress speaks protocol {protocol} and the replica {PROTOCOL}: their releases do not work together; "
            "each uses processes of its own release until the others are replaced"
        )


class Transport(Protocol):
    """Calls to engine replicas. Every method raises ReplicaGone or ReplicaUnreachable.

    A `link_id` names one reader for its whole life and is never reused.
    """

    def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        """Frames of a link; the first is empty and means attached. Ends when the link has been idle for a while."""
        ...

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        """Submit requests; False if the link is not attached. A known request id is not accepted twice."""
        ...

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None: ...

    async def wake(self) -> None:
        """Wake a deployment scaled to zero; returns once a replica answers."""
        ...


class ReplicaClient(Transport, Protocol):
    """`Transport` with the calls that carry no request."""

    async def unload_adapter(self, replica_id: str, digest: str) -> int:
        """Free an adapter's rows once no sequence uses them; returns the number of freed rows."""
        ...

    async def drain(self, replica_id: str) -> bool:
        """Have a replica take no new requests and be replaced; False if it drains already."""
        ...

    async def stats(self, replica_id: str) -> dict[str, Any]:
        """Counts, for tests and operators."""
        ...
