"""Limit on requests that wait for adapters which are on no device.

A request waits from its arrival to its first token, at most `limits.adapter_load_timeout_s`; a source may take longer.
The number of waiting requests is bounded per adapter and in total, so a source that hangs cannot fill the ingress. When
full, the newest request of the tenant with the most waiting requests is rejected in favour of a tenant with fewer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from app.config import LimitsConfig
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.placement.placer import Placer
from app.engine.errors import NotReady, QueueFull


def adapter_wait_timeout(name: str, limits: LimitsConfig) -> NotReady:
    """The error of a request whose adapter was not loaded in time."""
    return NotReady(
        f"adapter {name!r} was not loaded within limits.adapter_load_timeout_s ({limits.adapter_load_timeout_s:g} s); "
        "send the request again later",
        retry_after_s=5,
    )


class ColdStartLimiter:
    """One per ingress, on its event loop."""

    def __init__(self, placer: Placer, limits: LimitsConfig) -> None:
        self._placer = placer
        self.limits = limits
        self._waiting: dict[Stream, asyncio.TimerHandle] = {}
        self._by_digest: dict[str, dict[Stream, None]] = {}  # in order of arrival, as `_waiting`

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, stream: Stream) -> None:
        """Count a new request as waiting if its adapter is on no device. Raises QueueFull above the limits."""
        ref = stream.request.adapter
        if ref is None or self._placer.view.is_resident(ref.digest):
            return
        limits, tenant_id = self.limits, stream.request.tenant_id
        same = self._by_digest.get(ref.digest, {})
        if len(same) >= limits.max_pending_requests_per_adapter:
            refusal = QueueFull(
                f"{len(same)} requests wait for adapter {ref.name!r} to load and "
                f"limits.max_pending_requests_per_adapter is {limits.max_pending_requests_per_adapter}; "
                "send it again later",
                retry_after_s=2,
            )
            self._make_room(same, tenant_id, refusal)
        if len(self._waiting) >= limits.max_pending_cold_requests:
            refusal = QueueFull(
                f"{len(self._waiting)} requests wait for adapters to load and "
                f"limits.max_pending_cold_requests is {limits.max_pending_cold_requests}; send it again later",
                retry_after_s=2,
            )
            self._make_room(self._waiting, tenant_id, refusal)
        self._by_digest.setdefault(ref.digest, {})[stream] = None
        self._waiting[stream] = asyncio.get_running_loop().call_later(
            limits.adapter_load_timeout_s, self._time_out, stream
        )

    def leave(self, stream: Stream) -> None:
        """Stop counting a request: it has its first token, or has ended. No effect if it was not waiting."""
        timer = self._waiting.pop(stream, None)
        if timer is not None and stream.request.adapter is not None:
            timer.cancel()
            digest = stream.request.adapter.digest
            del self._by_digest[digest][stream]
            if not self._by_digest[digest]:
                del self._by_digest[digest]

    def _make_room(self, waiting: Mapping[Stream, object], tenant_id: str, refusal: QueueFull) -> None:
        """Reject the newest request of the tenant with the most in `waiting`. Raises `refusal` unless `tenant_id` would
        have fewer than that tenant even with one more."""
        counts = Counter(stream.request.tenant_id for stream in waiting)
        most = max(counts, key=counts.__getitem__)
        if counts[tenant_id] + 1 >= counts[most]:
            raise refusal
        last = next(stream for stream in reversed(list(waiting)) if stream.request.tenant_id == most)
        self.leave(last)
        last.inbox.put(refusal)

    def _time_out(self, stream: Stream) -> None:
        ref = stream.request.adapter
        self.leave(stream)
        if ref is not None and not self._placer.view.is_resident(ref.digest):  # otherwise it waits for its turn only
            stream.inbox.put(adapter_wait_timeout(ref.name, self.limits))
