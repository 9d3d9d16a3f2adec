"""Limit on requests that wait for adapters which are on no device.

A request waits from its beginning to its first token, and at most `limits.adapter_load_timeout_s`, which is less than a source
may take. How many wait is bounded per adapter and in all, so that a source that hangs cannot occupy the whole ingress.
When the limit is reached, the tenant with the most waiting requests gives way: its last one is refused in favour of a
tenant with fewer.
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
    """For a request that has waited for its adapter as long as one may."""
    return NotReady(
        f"adapter {name!r} was not read in limits.adapter_load_timeout_s ({limits.adapter_load_timeout_s:g} s); "
        "send the request again later",
        retry_after_s=5,
    )


class ColdStartLimiter:
    """One per ingress, on its event loop."""

    def __init__(self, placer: Placer, limits: LimitsConfig) -> None:
        self._placer = placer
        self.limits = limits
        self._waiting: dict[Stream, asyncio.TimerHandle] = {}
        self._of_digest: dict[str, dict[Stream, None]] = {}  # in order of arrival, as `_waiting`

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, stream: Stream) -> None:
        """A request begins; it waits if its adapter is on no device. Raises QueueFull if too many do."""
        ref = stream.request.adapter
        if ref is None or self._placer.view.is_resident(ref.digest):
            return
        limits, tenant_id = self.limits, stream.request.tenant_id
        same = self._of_digest.get(ref.digest, {})
        if len(same) >= limits.max_pending_requests_per_adapter:
            refusal = QueueFull(
                f"{len(same)} requests wait for adapter {ref.name!r} to be read and "
                f"limits.max_pending_requests_per_adapter is {limits.max_pending_requests_per_adapter}; send it again later",
                retry_after_s=2,
            )
            self._make_room(same, tenant_id, refusal)
        if len(self._waiting) >= limits.max_pending_cold_requests:
            refusal = QueueFull(
                f"{len(self._waiting)} requests wait for adapters to be read and "
                f"limits.max_pending_cold_requests is {limits.max_pending_cold_requests}; send it again later",
                retry_after_s=2,
            )
            self._make_room(self._waiting, tenant_id, refusal)
        self._of_digest.setdefault(ref.digest, {})[stream] = None
        self._waiting[stream] = asyncio.get_running_loop().call_later(
            limits.adapter_load_timeout_s, self._give_up, stream
        )

    def leave(self, stream: Stream) -> None:
        """Its first token is here, or it has ended; nothing happens if it does not wait."""
        alarm = self._waiting.pop(stream, None)
        if alarm is not None and stream.request.adapter is not None:
            alarm.cancel()
            digest = stream.request.adapter.digest
            del self._of_digest[digest][stream]
            if not self._of_digest[digest]:
                del self._of_digest[digest]

    def _make_room(self, waiting: Mapping[Stream, object], tenant_id: str, refusal: QueueFull) -> None:
        """Refuse the last of the tenant that has most of these, for one that has fewer with one more; or raise."""
        counts = Counter(stream.request.tenant_id for stream in waiting)
        most = max(counts, key=counts.__getitem__)
        if counts[tenant_id] + 1 >= counts[most]:
            raise refusal
        last = next(stream for stream in reversed(list(waiting)) if stream.request.tenant_id == most)
        self.leave(last)
        last.inbox.put(refusal)

    def _give_up(self, stream: Stream) -> None:
        ref = stream.request.adapter
        self.leave(stream)
        if ref is not None and not self._placer.view.is_resident(ref.digest):  # else it waits for its turn
            stream.inbox.put(adapter_wait_timeout(ref.name, self.limits))
