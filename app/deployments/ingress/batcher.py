"""Requests that arrive within a couple of milliseconds are assigned to replicas together.

In: single streams. Out: batches of them, for the assigner. Rule: a batch only assigns, which takes no time; no stream
waits for another's tokens. The batching is Serve's; this is the one place that knows.
"""

from __future__ import annotations

from ray import serve

from app.deployments.ingress.assigner import Assigner
from app.deployments.ingress.streams import Stream


class ServeBatcher:
    """The dispatcher's `Batcher`, with Serve's batching."""

    def __init__(self, assigner: Assigner) -> None:
        self._assigner = assigner

    async def assign(self, stream: Stream) -> None:
        await self._assign_together(stream)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002, max_concurrent_batches=8)
    async def _assign_together(self, streams: list[Stream]) -> list[None]:
        self._assigner.assign(streams)
        return [None for _ in streams]
