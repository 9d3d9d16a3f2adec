"""Request counts per tenant and adapter, flushed from each ingress to the store every two seconds, and an adapter's
status.

A request counts once for each adapter it named, whatever its outcome. A request that failed before it had an adapter is
not counted. A failed flush is merged into the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from app.deployments.ingress.adapter_admin import AdapterAdmin
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.error_responses import TABLE, ClientGone
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.serializers.loras import description_body
from app.deployments.rpc.background_tasks import repeat
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.adapter_stats import Activity, ActivityKey, first_token
from app.engine.errors import NotReady
from app.engine.request import Usage

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 2.0
#: Fields about memory. They (and loads) may be caused by another tenant with the same contents.
SHARED_FACTS = ("last_used", "residency")
#: Tiers an adapter is loaded from, the fastest last.
TIERS = ("source", "disk", "device")


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
        await asyncio.sleep(FLUSH_INTERVAL_S)
        await repeat(self.flush, FLUSH_INTERVAL_S, "sending adapters' request counts")

    def _add(self, counts: dict[ActivityKey, Activity]) -> None:
        for key, activity in counts.items():
            self._pending[key] = self._pending.get(key, Activity()).plus(activity)


async def adapter_status(
    admin: AdapterAdmin, metrics: AdapterMetrics, name: str, caller: Principal
) -> Mapping[str, Any]:
    """The body of `GET /v1/loras/{name}`. Raises NotFound, and NotReady while the store or placement is down.

    A project sees only what it caused itself: equal contents of two tenants share memory, and a shared name serves
    several tenants, but neither tenant may notice the other.
    """
    description = await admin.store.describe(name, tenant_id=caller.tenant_id)
    entry = description.entry
    if entry is None:
        return description_body(name, description, ())
    is_project = caller.kind == "project"
    await metrics.flush()  # so that a client sees the request it has just sent to this ingress
    stats = await metrics.tenants_service.adapter_stats(entry.ref, tenant_id=caller.tenant_id if is_project else None)
    counts = {"since": int(stats.since_s)} | activity_body(stats.activity)
    if is_project:
        body = description_body(name, description, ())
        return {field: value for field, value in body.items() if field not in SHARED_FACTS} | {"activity": counts}
    loads = {tier: stats.num_loads.get(tier, 0) for tier in TIERS}
    replicas = await admin.residency(entry.ref.digest) if entry.is_read else ()
    return description_body(name, description, replicas) | {"activity": counts | {"loads": loads}}


def activity_body(activity: Activity) -> dict[str, Any]:
    """Counts as JSON; times to first token are null if there were none."""
    times = None
    if number := activity.num_first_tokens:
        times = {"count": number, "mean": activity.first_token_s / number}
        times |= {f"p{part}": activity.first_token_quantile_s(part / 100) for part in (50, 99)}
    return {
        "requests": activity.num_requests,
        "errors": activity.num_errors,
        "prompt_tokens": activity.prompt_tokens,
        "cached_tokens": activity.cached_tokens,
        "completion_tokens": activity.completion_tokens,
        "time_to_first_token_seconds": times,
    }


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
