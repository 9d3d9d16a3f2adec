"""Limit on requests that wait for adapters which are on no device.

A request waits from its arrival to its first token, at most `limits.adapter_load_timeout_s`; a source may take longer.
The number of waiting requests is bounded per adapter and in total, so a source that hangs cannot fill the ingress. When
full, the newest request of the tenant with the most waiting requests is rejected in favour of a tenant with fewer
(`FairLimiter`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

from app.config import LimitsConfig
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.placement.placer import Placer
from app.engine.errors import NotReady, QueueFull
from app.engine.scheduling.fair_limiter import FairLimiter

K = TypeVar("K", bound=Hashable)


def adapter_wait_timeout(name: str, limits: LimitsConfig) -> NotReady:
    """The error of a request whose adapter was not loaded in time."""
    return NotReady(
        f"adapter {name!r} was not loaded within limits.adapter_load_timeout_s ({limits.adapter_load_timeout_s:g} s); "
        "send the request again later",
        retry_after_s=5,
    )


class PendingLimiter(Generic[K]):
    """Requests that wait for adapters, bounded per group (those for one adapter, say) and in total."""

    def __init__(self) -> None:
        self._total = FairLimiter[K]("limits.max_pending_cold_requests", 0, retry_after_s=2)
        self._groups: dict[Hashable, FairLimiter[K]] = {}
        self._group_of: dict[K, Hashable] = {}

    def add(self, key: K, group: Hashable, tenant_id: str, limits: LimitsConfig) -> list[tuple[K, QueueFull]]:
        """Count a request as waiting; returns those that gave way, each with its error. Raises QueueFull."""
        self._group_of[key] = group
        if group not in self._groups:
            self._groups[group] = FairLimiter("limits.max_pending_requests_per_adapter", 0, retry_after_s=2)
        self._groups[group].max_total = limits.max_pending_requests_per_adapter
        self._total.max_total = limits.max_pending_cold_requests
        try:
            gave_way = self._groups[group].add(key, tenant_id)
            gave_way += self._total.add(key, tenant_id, is_forced=bool(gave_way))
        except QueueFull:
            self.remove(key)
            raise
        for other, _ in gave_way:
            self.remove(other)
        return gave_way

    def remove(self, key: K) -> None:
        """The request waits no more; no effect if it is not here."""
        if key not in self._group_of:
            return
        group = self._group_of.pop(key)
        self._total.remove(key)
        self._groups[group].remove(key)
        if not len(self._groups[group]):
            del self._groups[group]


class ColdStartLimiter:
    """One per ingress, on its event loop."""

    def __init__(self, placer: Placer, limits: LimitsConfig) -> None:
        self._placer = placer
        self.limits = limits
        self._pending = PendingLimiter[Stream]()
        self._timers: dict[Stream, asyncio.TimerHandle] = {}

    def enter(self, stream: Stream) -> None:
        """Count a new request as waiting if its adapter is on no device. Raises QueueFull above the limits."""
        ref = stream.request.adapter
        if ref is None or self._placer.view.is_resident(ref.digest):
            return
        for other, refusal in self._pending.add(stream, ref.digest, stream.request.tenant_id, self.limits):
            self.leave(other)
            other.inbox.put(refusal)
        self._timers[stream] = asyncio.get_running_loop().call_later(
            self.limits.adapter_load_timeout_s, self._time_out, stream
        )

    def leave(self, stream: Stream) -> None:
        """Stop counting a request: it has its first token, or has ended. No effect if it was not waiting."""
        self._pending.remove(stream)
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def _time_out(self, stream: Stream) -> None:
        ref = stream.request.adapter
        self.leave(stream)
        if ref is not None and not self._placer.view.is_resident(ref.digest):  # otherwise it waits for its turn only
            stream.inbox.put(adapter_wait_timeout(ref.name, self.limits))
