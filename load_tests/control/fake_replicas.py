"""Replicas without an engine, to measure or test the control plane alone.

Each answers a request with one token after a random time, or at once, and counts its requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from app.deployments.rpc.transport import Frame, ReplicaGone, ReplicaUnreachable
from app.engine.request import GenerateRequest, TokenChunk


class InstantReplicas:
    """`Transport` of one ingress to replicas that `num_running` counts for all ingresses that share it.

    `service_s` draws how long a request takes. `broken` names replicas that this ingress cannot reach, `silent` those
    that do not even answer; `calls` counts what was tried there.
    """

    def __init__(self, num_running: Counter[str], service_s: Callable[[], float]) -> None:
        self.num_running = num_running
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.submitted: list[tuple[str, GenerateRequest]] = []
        self._service_s = service_s
        self._links: dict[str, asyncio.Queue[TokenChunk]] = {}

    async def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        await self._reach(replica_id)
        queue = self._links[link_id] = asyncio.Queue()
        yield []
        while True:
            chunks = [await queue.get()]
            while not queue.empty():
                chunks.append(queue.get_nowait())
            yield chunks

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        await self._reach(replica_id)
        for request in requests:
            self.submitted.append((replica_id, request))
            self.num_running[replica_id] += 1
            service_s = self._service_s()
            if service_s:
                asyncio.get_running_loop().call_later(service_s, self._finish, replica_id, link_id, request.request_id)
            else:
                self._finish(replica_id, link_id, request.request_id)
        return True

    async def wake(self) -> None:
        """All replicas are there from the beginning."""

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """Do nothing: running requests go on, without a reader."""

    def _finish(self, replica_id: str, link_id: str, request_id: str) -> None:
        self.num_running[replica_id] -= 1
        self._links[link_id].put_nowait(TokenChunk(request_id, (1,), finish_reason="length"))

    async def _reach(self, replica_id: str) -> None:
        self.calls[replica_id] += 1
        if replica_id in self.silent:
            await asyncio.Event().wait()
        if replica_id in self.broken:
            raise ReplicaGone(replica_id) if self.calls[replica_id] % 2 else ReplicaUnreachable(replica_id)
