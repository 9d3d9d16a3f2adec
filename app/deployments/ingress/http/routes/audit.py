"""/v1/status, /v1/jobs, /v1/events and /v1/audit. A tenant reads what its own calls caused, an operator everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.request_parsing import MAX_PAGE, Limit, QueryParams, page_body
from app.deployments.ingress.principal import Principal, http_principal
from app.deployments.ingress.schemas import loras as schemas
from app.deployments.ingress.schemas.health import ServiceStatus
from app.deployments.ingress.schemas.loras import LoraJob
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import job_body, record_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import AuditRecord, Event
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter

#: Events that a tenant's own calls cause. Other events may come from another tenant that has the same contents.
OWN_EVENTS = frozenset({
    "requested", "routable", "failed", "registered", "registered lazily", "draining", "removed",
    "put alias", "promote alias", "roll back alias", "remove alias",
})  # fmt: skip


class RecordQuery(QueryParams):
    """Newest first; `before` is the id of the previous page's last record."""

    name: str | None = None
    limit: Limit = 100
    before: str | None = None


def add_audit_routes(routes: APIRouter, service: IngressService) -> None:
    @routes.get("/v1/status", response_model=ServiceStatus)
    async def status(request: Request) -> Response:
        """Replicas, tiers and recent failures for an operator; only readiness for a project."""
        return JSONResponse(await service.status(http_principal(request)))

    @routes.get("/v1/jobs/{job_id}", response_model=LoraJob)
    async def job(job_id: str, request: Request) -> Response:
        """The state of a load or an unload."""
        tenant_id = http_principal(request).tenant_id
        return JSONResponse(job_body(await service.adapter_admin.store.job(job_id, tenant_id=tenant_id)))

    @routes.get("/v1/events", response_model=PageResponse[schemas.EventResponse])
    async def events(request: Request, query: Annotated[RecordQuery, Query()]) -> Response:
        """Adapter events, newest first."""
        caller, store = http_principal(request), service.adapter_admin.store
        if caller.kind == "project":
            return _record_page(await _own_events(store, query, caller.tenant_id), query.limit)
        records = await store.events(query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id)
        return _record_page(records, query.limit)

    @routes.get("/v1/audit", response_model=PageResponse[schemas.AuditRecordResponse])
    async def audit(request: Request, query: Annotated[RecordQuery, Query()]) -> Response:
        """Management calls and their callers, newest first."""
        caller = http_principal(request)
        records = await service.adapter_admin.store.audit(
            query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id
        )
        return _record_page(records, query.limit)


async def recent_events(service: IngressService, caller: Principal, limit: int) -> list[dict[str, Any]]:
    """The newest events that a caller may see."""
    store = service.adapter_admin.store
    if caller.kind == "project":
        records = await _own_events(store, RecordQuery(limit=limit), caller.tenant_id)
    else:
        records = await store.events(None, limit=limit, before=None, tenant_id=caller.tenant_id)
    return [record_body(record) for record in records[:limit]]


async def _own_events(store: StoreService[SharedAdapter], query: RecordQuery, tenant_id: str) -> list[Event]:
    """A page of the caller's own events and one more. Pages are filled: a short one would reveal other events."""
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
    data = [record_body(record) for record in records[:limit]]
    return JSONResponse(page_body(data, has_more=len(records) > limit))
