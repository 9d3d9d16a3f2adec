"""The routes that tell what happens: status, jobs, events, audit.

In: `AdapterAdmin`. Out: routes. Rule: a tenant reads what its own calls caused, an operator everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.request_parsing import MAX_PAGE, Limit, QueryParams, page_body
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.schemas import loras as schemas
from app.deployments.ingress.schemas.health import ServiceStatus
from app.deployments.ingress.schemas.loras import LoraJob
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import job_body, record_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import AuditRecord, Event
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter

#: Events that a tenant's own calls cause. Others may be caused by whoever has the same contents.
OWN_EVENTS = frozenset({
    "requested", "routable", "failed", "registered", "registered unread", "draining", "removed",
    "put alias", "promote alias", "roll back alias", "remove alias",
})  # fmt: skip


class RecordQuery(QueryParams):
    """The newest first. `before` is the id of the last record that is known."""

    name: str | None = None
    limit: Limit = 100
    before: str | None = None


def add_audit_routes(routes: APIRouter, service: IngressService) -> None:
    """Status, jobs, events and the audit."""

    @routes.get("/v1/status", response_model=ServiceStatus)
    async def status(request: Request) -> Response:
        """The service as its operator sees it: replicas, tiers, what failed lately. A project is told that it lives."""
        return JSONResponse(await service.status(http_principal(request)))

    @routes.get("/v1/jobs/{job_id}", response_model=LoraJob)
    async def job(job_id: str, request: Request) -> Response:
        """A load or an unload: its state and its reason."""
        tenant_id = http_principal(request).tenant_id
        return JSONResponse(job_body(await service.management.store.job(job_id, tenant_id=tenant_id)))

    @routes.get("/v1/events", response_model=PageResponse[schemas.EventResponse])
    async def events(request: Request, query: Annotated[RecordQuery, Query()]) -> Response:
        """What happened, the newest first."""
        caller, store = http_principal(request), service.management.store
        if caller.kind == "project":
            return _record_page(await _own_events(store, query, caller.tenant_id), query.limit)
        records = await store.events(query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id)
        return _record_page(records, query.limit)

    @routes.get("/v1/audit", response_model=PageResponse[schemas.AuditRecordResponse])
    async def audit(request: Request, query: Annotated[RecordQuery, Query()]) -> Response:
        """Who asked for what, the newest first."""
        caller = http_principal(request)
        records = await service.management.store.audit(
            query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id
        )
        return _record_page(records, query.limit)


async def _own_events(store: StoreService[SharedAdapter], query: RecordQuery, tenant_id: str) -> list[Event]:
    """A page and one more. Events that others caused are read over: a page that they shorten would tell of them."""
    found: list[Event] = []
    before = query.before
    while len(found) <= query.limit:
        records = await store.events(query.name, limit=MAX_PAGE, before=before, tenant_id=tenant_id)
        found += [record for record in records if record.event in OWN_EVENTS]
        if len(records) < MAX_PAGE:
            break
        before = records[-1].id
    return found[: query.limit + 1]


def _record_page(records: Sequence[Event] | Sequence[AuditRecord], limit: int) -> Response:
    told = [record_body(record) for record in records[:limit]]
    return JSONResponse(page_body(told, has_more=len(records) > limit))
