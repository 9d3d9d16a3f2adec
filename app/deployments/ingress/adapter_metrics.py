"""Request counts per tenant and adapter, flushed from each ingress to the store every two seconds.

A request counts once for each adapter it named, whatever its outcome. A request that failed before it had an adapter is
not counted. A failed flush is merged into the next one.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.error_responses import TABLE, ClientGone
from app.deployments.rpc.background_tasks import repeat
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.adapter_stats import Activity, ActivityKey, first_token
from app.engine.errors import NotReady
from app.engine.request import Usage

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 2.0


class AdapterMetrics:
    """One per ingress, on its event loop."""

    def __init__(self, tenants_service: TenantsService) -> None:
        self.tenants_service = tenants_service
        self._pending: dict[ActivityKey, Activity] = {}

    def record(self, task: GenerationTask, status: int) -> None:
        """Count a finished task; `status` is what its client got. A client that left is no error."""
        is_error = status >= HTTPStatus.BAD_REQUEST and status != TABLE[ClientGone].status
        request = Activity(num_requests=1, num_errors=int(is_error))
        if len({each.requested_adapter for each in task.requests}) == 1:
            request = request.plus(_first_token(task))
        counts: dict[ActivityKey, Activity] = {}
        for each, usage in zip(task.requests, task.usages, strict=True):
            if (ref := each.requested_adapter) is not None:
                key = ActivityKey(each.tenant_id, ref.tenant_id, ref.name, ref.digest)
                counts[key] = counts.get(key, request).plus(_tokens(usage))
        self._add(counts)

    async def flush(self) -> None:
        """Send the counts since the last flush. Raises NotReady while the store is down; then nothing is lost."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        try:
            await self.tenants_service.note_activity(tuple(pending.items()))
        except BaseException:
            self._add(pending)
            raise

    async def close(self) -> None:
        """Flush what is left if the store is up."""
        try:
            await self.flush()
        except NotReady as error:
            logger.warning("request counts of %d adapters are lost: %s", len(self._pending), error)

    async def keep_flushing(self) -> None:
        """Flush at intervals until cancelled."""
        await repeat(self.flush, FLUSH_INTERVAL_S, "sending adapters' request counts")

    def _add(self, counts: dict[ActivityKey, Activity]) -> None:
        for key, activity in counts.items():
            self._pending[key] = self._pending.get(key, Activity()).plus(activity)


def request_activity(task: GenerationTask) -> Activity:
    """One request and its tokens."""
    activity = Activity(num_requests=1).plus(_first_token(task))
    for usage in task.usages:
        activity = activity.plus(_tokens(usage))
    return activity


def _first_token(task: GenerationTask) -> Activity:
    first_s = task.progress.first_s
    return Activity() if first_s is None else first_token(first_s - task.requests[0].arrival_s)


def _tokens(usage: Usage | None) -> Activity:
    used = usage or Usage(0, 0, 0)
    return Activity(
        prompt_tokens=used.prompt_tokens, cached_tokens=used.cached_tokens, completion_tokens=used.completion_tokens
    )
