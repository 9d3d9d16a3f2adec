"""What an ingress sees of adapters' requests, on its way to the process that knows of all ingresses.

In: jobs as they end, with what their clients were told. Out: sums by tenant and adapter, told every two seconds. Rule:
a request counts once for each adapter that it asked for, whatever became of it; one that was refused before it had an
adapter counts for none. What could not be told is told with the next.
"""

from __future__ import annotations

import asyncio
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

TELL_INTERVAL_S = 2.0


class AdapterMetrics:
    """One per ingress, on its event loop. What waits to be told is of adapters that the registry's copy here has."""

    def __init__(self, owner: TenantsService) -> None:
        self.owner = owner
        self._untold: dict[ActivityKey, Activity] = {}

    def ended(self, job: GenerationTask, status: int) -> None:
        """A job has ended; `status` is what its client was told. A client that left is no error."""
        is_error = status >= HTTPStatus.BAD_REQUEST and status != TABLE[ClientGone].status
        request = Activity(num_requests=1, num_errors=int(is_error))
        if job.progress.first_s is not None and len({each.requested_adapter for each in job.requests}) == 1:
            request = request.plus(first_token(job.progress.first_s - job.requests[0].arrival_s))
        seen: dict[ActivityKey, Activity] = {}
        for each, usage in zip(job.requests, job.usages, strict=True):
            if (ref := each.requested_adapter) is not None:
                key = ActivityKey(each.tenant_id, ref.tenant_id, ref.name, ref.digest)
                seen[key] = seen.get(key, request).plus(_tokens(usage))
        self._add(seen)

    async def tell(self) -> None:
        """Say what was seen since the last time. Raises NotReady while the owner is away; then nothing is lost."""
        untold, self._untold = self._untold, {}
        if not untold:
            return
        try:
            await self.owner.note_activity(tuple(untold.items()))
        except BaseException:
            self._add(untold)
            raise

    async def close(self) -> None:
        """Tell what is left, if the owner is there to hear it."""
        try:
            await self.tell()
        except NotReady as error:
            logger.warning("requests of %d adapters are not in what is seen of them: %s", len(self._untold), error)

    async def keep_telling(self) -> None:
        """`tell` until cancelled, whatever the owner does."""
        await asyncio.sleep(TELL_INTERVAL_S)
        await repeat(self.tell, TELL_INTERVAL_S, "telling what is seen of adapters")

    def _add(self, seen: dict[ActivityKey, Activity]) -> None:
        for key, activity in seen.items():
            self._untold[key] = self._untold.get(key, Activity()).plus(activity)


def _tokens(usage: Usage | None) -> Activity:
    used = usage or Usage(0, 0, 0)
    return Activity(
        prompt_tokens=used.prompt_tokens, cached_tokens=used.cached_tokens, completion_tokens=used.completion_tokens
    )
