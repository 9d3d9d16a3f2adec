"""What this ingress adds to the hour of traffic that the store's process keeps for the console: finished requests, and
open and queued ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus

from app.deployments.ingress.adapter_metrics import request_activity
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.placement.placer import Placer
from app.deployments.rpc.background_tasks import repeat
from app.deployments.tenancy.usage.adapter_stats import Activity
from app.deployments.tenancy.usage.traffic_history import (
    BUCKET_S,
    REPORT_INTERVAL_S,
    BucketPart,
    Gauges,
    TrafficHistory,
)
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: Statuses that refuse a request because of a limit or missing capacity.
REFUSALS = frozenset({429, 503})
#: Parts that wait for a store that does not answer; the oldest are dropped first.
MAX_PENDING = 4096


class TrafficReporter:
    """One per ingress, on its event loop. `history` is in the store's process; `clock` gives Unix time."""

    def __init__(
        self,
        history: TrafficHistory,
        ingress_id: str,
        connections: ReplicaConnections,
        placer: Placer,
        clock: Callable[[], float],
    ) -> None:
        self.history = history
        self._ingress_id = ingress_id
        self._connections, self._placer = connections, placer
        self._clock = clock
        self._pending: dict[tuple[int, str | None], BucketPart] = {}
        self._last_sample = 0

    def record(self, task: GenerationTask | None, status: int) -> None:
        """Count a finished request, as `IngressService.observe` does."""
        is_refused = status in REFUSALS
        is_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR and not is_refused
        activity = Activity(num_requests=1) if task is None else request_activity(task)
        tenant_id = None if task is None else task.caller.tenant_id
        self._add([
            BucketPart(self._number(), tenant_id, activity._replace(num_errors=int(is_error)), int(is_refused))
        ])  # fmt: skip

    async def num_open_elsewhere(self) -> int:
        """Requests that the other ingresses had open when they last reported. Raises NotReady."""
        return await self.history.num_open_elsewhere(self._ingress_id)

    async def report(self) -> None:
        """Send what has ended since the last report, and once per bucket what is open. Raises NotReady while the store
        is down; then it is sent later."""
        number = self._number()
        if number != self._last_sample:
            self._last_sample = number
            replicas = self._placer.view.replicas
            num_requests = sum(map(self._connections.loads.num_requests, replicas))
            gauges = Gauges(self._connections.num_streams, num_requests, len(replicas))
            self._add([BucketPart(number, None, gauges=gauges)])
        await self._send()

    async def keep_reporting(self) -> None:
        """Report at intervals until cancelled."""
        await repeat(self.report, REPORT_INTERVAL_S, "sending this ingress's traffic")

    async def close(self) -> None:
        """Report the requests that are left, if the store is up."""
        try:
            await self._send()
        except NotReady as error:
            logger.warning("the last %g s of traffic are lost: %s", REPORT_INTERVAL_S, error)

    async def _send(self) -> None:
        pending, self._pending = self._pending, {}
        if not pending:
            return
        try:
            await self.history.add(self._ingress_id, tuple(pending.values()))
        except BaseException:
            later, self._pending = self._pending, pending
            self._add(later.values())
            raise

    def _add(self, parts: Iterable[BucketPart]) -> None:
        for part in parts:
            key = part.number, part.tenant_id
            self._pending[key] = self._pending[key].plus(part) if key in self._pending else part
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def _number(self) -> int:
        return int(self._clock() // BUCKET_S)
