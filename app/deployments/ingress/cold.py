"""How many requests wait for adapters that are on no device.

In: requests that begin, and that get their first token or end. Out: room, or a refusal. Rule: those that wait for one
adapter, or for any, are bounded, so that a source that hangs cannot take up the whole ingress; and none waits for its
adapter longer than `adapter_wait_s`, which is less than a source may take.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from app.config import LimitsConfig
from app.deployments.ingress.streams import Stream
from app.deployments.placement.placer import Placer
from app.engine.errors import NotReady, QueueFull


class ColdRequests:
    """One per ingress, on its event loop."""

    def __init__(self, placer: Placer, limits: LimitsConfig) -> None:
        self._placer = placer
        self.limits = limits
        self._waiting: dict[Stream, asyncio.TimerHandle] = {}
        self._per_digest: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, stream: Stream) -> None:
        """A request begins; it waits if its adapter is on no device. Raises QueueFull if too many do."""
        ref = stream.request.adapter
        if ref is None or self._placer.view.is_resident(ref.digest):
            return
        limits = self.limits
        if self._per_digest[ref.digest] >= limits.max_waiting_per_adapter:
            raise QueueFull(
                f"{self._per_digest[ref.digest]} requests wait for adapter {ref.name!r} to be read and "
                f"limits.max_waiting_per_adapter is {limits.max_waiting_per_adapter}; send it again later",
                retry_after_s=2,
            )
        if len(self._waiting) >= limits.max_waiting_for_adapters:
            raise QueueFull(
                f"{len(self._waiting)} requests wait for adapters to be read and "
                f"limits.max_waiting_for_adapters is {limits.max_waiting_for_adapters}; send it again later",
                retry_after_s=2,
            )
        self._per_digest[ref.digest] += 1
        self._waiting[stream] = asyncio.get_running_loop().call_later(limits.adapter_wait_s, self._give_up, stream)

    def leave(self, stream: Stream) -> None:
        """Its first token is here, or it has ended; nothing happens if it does not wait."""
        alarm = self._waiting.pop(stream, None)
        if alarm is not None and stream.request.adapter is not None:
            alarm.cancel()
            digest = stream.request.adapter.digest
            self._per_digest[digest] -= 1
            if not self._per_digest[digest]:
                del self._per_digest[digest]

    def _give_up(self, stream: Stream) -> None:
        ref = stream.request.adapter
        self.leave(stream)
        if ref is not None and not self._placer.view.is_resident(ref.digest):  # else it waits for its turn
            stream.inbox.put(
                NotReady(
                    f"adapter {ref.name!r} was not read in limits.adapter_wait_s ({self.limits.adapter_wait_s:g} s); "
                    "send the request again later",
                    retry_after_s=5,
                )
            )
